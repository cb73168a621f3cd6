"""The text of a session: prompt and output ids, and the running hash of every prefix."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import running_hashes


class CommittedTokens:
    """Tokens that are final. They are only ever added to."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._hashes = [0]  # entry n is of the first n tokens
        self.prompt_length = len(prompt_token_ids)
        self.extend(prompt_token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_output(self) -> int:
        """Tokens after the prompt."""
        return len(self._token_ids) - self.prompt_length

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self._token_ids[self.prompt_length :])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._token_ids += token_ids
        self._hashes += running_hashes(self._hashes[-1], token_ids)

    def after(self, length: int) -> tuple[int, ...]:
        """The tokens after the first ``length``."""
        return tuple(self._token_ids[length:])

    def prefix_hash(self, length: int) -> int:
        """The hash of the first ``length`` tokens."""
        return self._hashes[length]
