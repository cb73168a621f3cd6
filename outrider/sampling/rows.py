"""Rows of logits: the request of each, and rows of one request as a span.

Plain Python; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.ports import Open
from outrider.sampling.parameters import needs_history
from outrider.sampling.session import SessionSampling
from outrider.structured_output import PositionMasks
from outrider.types import Support


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row of logits, for the token at position ``length``."""

    session: SessionSampling
    tokens: Sequence[int]
    """Token ids, at least ``length``: prompt, output, draft tokens. Read only where ``needs_history`` says so."""
    length: int
    """``tokens[:length]`` come before the token to be drawn, which stands at this absolute position."""
    base: int
    """Committed tokens when the proposal was made; keys the random streams."""
    masks: PositionMasks | None = None
    """Masks of the session's grammar; None: they are made when the row is masked, if there is a grammar."""

    @property
    def open(self) -> Open:
        """The session's request."""
        return self.session.open

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens before this one, draft tokens included."""
        return max(0, self.length - self.open.prompt_length)


@dataclass(slots=True)  # frozen, it would take twice as long to make
class ScoreRequest:
    """One session's positions to score."""

    session: SessionSampling
    tokens: Sequence[int]
    """Committed token ids, at least ``base``."""
    base: int
    """Committed tokens the proposal builds on; position 0 is the token there."""
    draft_token_ids: Sequence[int] = ()  # [K]
    support: Support | None = None
    """Support for sparse rejection with K > 0."""
    masks: PositionMasks | None = None
    """Masks of the positions, as in ``LogitRow``."""

    @property
    def open(self) -> Open:
        """The session's request."""
        return self.session.open

    @property
    def num_positions(self) -> int:
        """K+1."""
        return len(self.draft_token_ids) + 1

    def rows(self) -> list[LogitRow]:
        """Rows of the K+1 positions. Committed and draft tokens are joined only if a processor reads them."""
        tokens = self.tokens
        if self.draft_token_ids and needs_history(self.open.sampling):
            tokens = [*self.tokens[: self.base], *self.draft_token_ids]
        return [LogitRow(self.session, tokens, self.base + i, self.base, self.masks) for i in range(self.num_positions)]


@dataclass(frozen=True, slots=True)
class SessionSpan:
    """Run of neighbouring rows of one request."""

    session: SessionSampling
    rows: Sequence[LogitRow]
    start: int
    """Index of the first of them in the batch."""

    @property
    def open(self) -> Open:
        """The session's request."""
        return self.session.open

    @property
    def stop(self) -> int:
        """One past the last's index."""
        return self.start + len(self.rows)

    @property
    def indices(self) -> range:
        """Indices of the rows in the batch."""
        return range(self.start, self.stop)


def spans_of(rows: Sequence[LogitRow]) -> list[SessionSpan]:
    """Runs of rows of the same request, so that parameters are read once per request."""
    return list(_spans(rows))


def _spans(rows: Sequence[LogitRow]) -> Iterator[SessionSpan]:
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop].session is not rows[start].session:
            yield SessionSpan(rows[start].session, rows[start:stop], start)
            start = stop
