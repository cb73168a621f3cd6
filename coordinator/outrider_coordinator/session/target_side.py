"""State of a session on its target: what it holds, and what it was asked. Decides nothing."""

from __future__ import annotations

from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.readiness import Readiness, ServiceSide
from outrider_coordinator.session.table import Flag, IntColumn, Row


class TargetSide(ServiceSide):
    """State on the target; what steps read and write is in the session's row."""

    held = IntColumn(col.TARGET_HELD)
    """Committed tokens the target is known to hold."""
    losses = IntColumn(col.TARGET_LOSSES)
    """Number of losses in a row."""
    announced = IntColumn(col.ANNOUNCED)
    """Generation of the ``Score`` that it was told of, to be scored once its proposal comes directly; 0: none."""
    lookahead_credit = IntColumn(col.CREDIT)
    """Plain steps that it may compute before they are asked for: what is left of a ``Prepare``."""
    claims = Flag(col.CLAIMS)
    """True if it was asked for a step that it had begun by itself, whose draft tokens come with the scores."""
    num_plain_steps = IntColumn(col.NUM_PLAIN)
    """Steps in a row that were asked for without drafts."""

    def __init__(self, row: Row) -> None:
        super().__init__(row, col.TARGET_READINESS, Readiness.CLOSED)
        self.part = None
        self.is_held_back = False
        """The next part of such a text waits until the draft has taken the states of those before."""
        self.hidden_state_layers: tuple[int, ...] = ()
        """Layers whose states the target was opened with."""

    @property
    def asked(self) -> int | None:
        """The generation of the ``Score`` that has not been answered."""
        return self.row.values.item(col.TARGET_ASKED) or None

    @asked.setter
    def asked(self, generation: int | None) -> None:
        self.row.values[col.TARGET_ASKED] = generation or 0

    @property
    def part(self) -> int | None:
        """Tokens that it builds on, where a long text's hidden states go part by part and this is not the last."""
        return self._part

    @part.setter
    def part(self, part: int | None) -> None:
        self._part = part
        values = self.row.values
        values[col.FLAGS] = values.item(col.FLAGS) & ~col.HAS_PART | (col.HAS_PART if part is not None else 0)

    def note_score(self, *, is_plain: bool) -> None:
        """A step is requested; one with drafts ends the credit."""
        self.num_plain_steps = self.num_plain_steps + 1 if is_plain else 0
        self.lookahead_credit = max(0, self.lookahead_credit - 1) if is_plain else 0

    def note_answer(self, held: int) -> None:
        """The target answered and holds this number of committed tokens."""
        self.held, self.asked, self.losses, self.part = held, None, 0, None

    def reset(self, readiness: Readiness) -> None:
        """The target holds nothing of this session any more, and owes no answer."""
        self.readiness = readiness
        self.held, self.asked, self.part, self.is_held_back, self.claims = 0, None, None, False, False
        self.lookahead_credit = self.num_plain_steps = 0
