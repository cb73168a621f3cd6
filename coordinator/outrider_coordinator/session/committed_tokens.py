"""Committed tokens of a session: prompt and output ids, and the hash of every prefix."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cooperative import Work
from outrider.packed_ids import pack_long
from outrider.prefix_hash import PrefixHash, PrefixHasher
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.table import IntColumn, Row


class CommittedTokens:
    """Final tokens, which are only appended to."""

    length = IntColumn(col.LENGTH)
    """Token ids of prompt and output."""

    def __init__(
        self, prompt_token_ids: Sequence[int], prefix_hash_key: bytes = b"", *, row: Row | None = None
    ) -> None:
        self.row = row or Row()
        self._prompt_token_ids: tuple[int, ...] = pack_long(prompt_token_ids)
        self.ids = list(prompt_token_ids)
        """All tokens, to which those are added that the row's columns count already."""
        self._prefix_hasher = PrefixHasher(prefix_hash_key)
        self.prompt_length = self.length = len(prompt_token_ids)
        self._note_last()

    def __len__(self) -> int:
        return self.length

    @property
    def num_output(self) -> int:
        """Tokens after the prompt."""
        return self.length - self.prompt_length

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self.ids[self.prompt_length :])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.ids += token_ids
        self.length += len(token_ids)
        self._note_last()

    def _note_last(self) -> None:
        if self.ids:
            self.row.values[col.LAST] = self.ids[-1]

    def after(self, length: int) -> tuple[int, ...]:
        """The tokens after the first ``length``."""
        if not length and not self.num_output:
            return self._prompt_token_ids  # long, mostly, and asked for by two services
        return tuple(self.ids[length:])

    def cut(self, count: int) -> None:
        """Drop the last ``count`` tokens, behind the end of the output."""
        if count:
            del self.ids[-count:]
            self.length -= count

    def prefix_hash(self, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens; each token is hashed once."""
        return self._prefix_hasher.at(self.ids, length)

    def prepare(self) -> Work[None]:
        """Hash all full blocks, so that ``prefix_hash`` finds them; with pauses."""
        for token_ids in (self._prompt_token_ids, self.ids):  # the prompt is packed if it is long
            yield from self._prefix_hasher.hash_blocks(token_ids, len(token_ids))
