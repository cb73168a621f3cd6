"""Free text at the beginning of an output, such as reasoning, up to the text that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class FreeText:
    """Finds where the free text of an output ends."""

    def __init__(self, ending: bytes, bytes_of: Callable[[int], bytes]) -> None:
        """``ending``: its last bytes. ``bytes_of``: the bytes of a token."""
        self._ending, self._bytes_of = ending, bytes_of
        self._seen: list[int] = []
        """Tokens that were read, up to the end of the free text."""
        self._tail = b""
        self._has_ended = False

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens of the free text, the last of which completes its ending; None if it has not ended."""
        count = len(self._seen)
        if list(token_ids[:count]) != self._seen:
            self._seen, self._tail, self._has_ended = [], b"", False
        for token_id in token_ids[len(self._seen) :]:
            if self._has_ended:
                break
            self._seen.append(token_id)
            text = self._tail + self._bytes_of(token_id)
            self._has_ended = self._ending in text
            self._tail = text[-len(self._ending) :]
        return len(self._seen) if self._has_ended else None
