"""The verdicts of one message of the target, summed up: how many, how long their rounds took, what was drafted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class VerdictGroup:
    """Verdicts of steps with draft tokens, or of steps without."""

    num_rows: int = 0
    num_timed: int = 0
    sum_seconds: float = 0.0

    def note(self, began: float | None, now: float) -> None:
        """One verdict of a round that began then; None: at an unknown time."""
        self.num_rows += 1
        if began is not None:
            self.num_timed += 1
            self.sum_seconds += now - began

    @property
    def seconds(self) -> float | None:
        """Mean round duration; None unless most rounds were timed."""
        return self.sum_seconds / self.num_timed if 2 * self.num_timed > self.num_rows else None


@dataclass(slots=True)
class VerdictBatch:
    """The verdicts of one message."""

    now: float
    plain: VerdictGroup = field(default_factory=VerdictGroup)
    drafting: VerdictGroup = field(default_factory=VerdictGroup)
    num_drafted: int = 0
    """Draft tokens of all rows."""
    draft_length: int = 0
    """Of the longest proposal."""
    num_tokens: int = 0
    """Tokens gained."""

    def note(self, began: float | None, num_drafted: int, num_accepted: int) -> None:
        """One verdict."""
        self.num_tokens += num_accepted + 1
        group = self.drafting if num_drafted else self.plain
        group.note(began, self.now)
        self.num_drafted += num_drafted
        self.draft_length = max(self.draft_length, num_drafted)

    @property
    def num_rows(self) -> int:
        """Verdicts."""
        return self.plain.num_rows + self.drafting.num_rows

    @property
    def is_mixed(self) -> bool:
        """Whether some sessions drafted and others did not."""
        return bool(self.plain.num_rows and self.drafting.num_rows)
