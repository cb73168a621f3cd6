"""Timing of rounds: the verdicts of one message of the target, summed up, and which of these rounds say what plain and
speculative decoding take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.limits import MAX_DRAFT_LENGTH
from outrider_coordinator.speculation.estimates.foreign_sessions import ForeignSessions
from outrider_coordinator.speculation.estimates.step_times import StepTimes
from outrider_coordinator.speculation.mode_selector import Mode

ROUNDS_NOT_AHEAD = 2
"""Plain rounds in a row after which a target computes ahead."""
_KNOWN_ROUNDS = 4
"""Rounds of about so many rows after which their duration is known."""
_MOST = 0.5
"""Draft tokens of each foreign row, or share of all rows, from which on foreign sessions decode in the same mode."""
_WHOLE = 0.8
"""Share of the sessions above which a message is of all of them, but for some that come or go."""
_COLD_ROUNDS = 4
"""The first speculative rounds of all: they take longer than any later ones, and are not counted."""
_YOUNG_ROUNDS = 24
"""Speculative rounds of all during which clocks and caches may still be cold."""
_NEWEST = 0.1


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

    def add(self, num_rows: int, num_timed: int, sum_seconds: float) -> None:
        """So many verdicts at once."""
        self.num_rows += num_rows
        self.num_timed += num_timed
        self.sum_seconds += sum_seconds

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

    def add_plain(self, num_rows: int, num_timed: int, sum_seconds: float) -> None:
        """Verdicts of steps without draft tokens, of which so many were timed, and the sum of those times."""
        self.num_tokens += num_rows
        self.plain.add(num_rows, num_timed, sum_seconds)

    @property
    def num_rows(self) -> int:
        """Verdicts."""
        return self.plain.num_rows + self.drafting.num_rows

    @property
    def is_mixed(self) -> bool:
        """Whether some sessions drafted and others did not."""
        return bool(self.plain.num_rows and self.drafting.num_rows)


class RoundTimer:
    """Durations of rounds, and the share of the sessions that are in one forward together."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.share = 1.0
        """Of a speculative round: 1 unless sessions stand in groups that take turns, as where the draft has a device of
        its own. Plain steps wait for each other. The first rounds count in full: taken for 1 until many were seen, it
        would make speculation seem slower than it is.
        """
        self.foreign = ForeignSessions()
        self._num_plain_rounds = self._num_speculative_rounds = self._num_shares = 0

    def note(
        self, batch: VerdictBatch, num_sessions: int, *, rows: int, tokens: int, seconds: float, is_settled: bool
    ) -> bool:
        """Time one message; returns whether it was a speculative round of known duration. Rounds count as those of all
        sessions, foreign ones too, and only while these decode in the same mode.

        ``num_sessions`` are those whose prompts are computed; ``rows``, ``tokens`` and ``seconds`` are the forward's;
        ``is_settled``: nearly all sessions that are to draft do.
        """
        if not batch.drafting.num_rows:
            self._note_plain(batch, num_sessions, rows, tokens)
            return False
        self._num_plain_rounds = 0
        others = rows - batch.num_rows if self.foreign.num_sessions else 0
        others_drafted = tokens - rows - batch.num_drafted
        is_decode = rows == batch.num_rows + others and 0 <= others_drafted <= MAX_DRAFT_LENGTH * others
        if is_decode and seconds > 0.0:
            self.times.note_target(rows, tokens, seconds)
        duration = batch.drafting.seconds
        if duration is None or not is_settled or (others and not (is_decode and others_drafted >= _MOST * others)):
            return False
        self._num_speculative_rounds += 1
        if self._num_speculative_rounds <= _COLD_ROUNDS:
            return False
        self._note_share(batch, num_sessions)
        load_ratio = self.foreign.load_ratio(num_sessions)
        theirs = others_drafted / others if others else batch.num_drafted / batch.num_rows
        drafted = batch.num_drafted + round(theirs * (load_ratio - 1.0) * batch.num_rows)
        longest = max(batch.draft_length, round(theirs))
        self.times.note_speculative(round(load_ratio * batch.num_rows), longest, drafted, duration)
        return True

    def _note_plain(self, batch: VerdictBatch, num_sessions: int, rows: int, tokens: int) -> None:
        self._num_plain_rounds += 1
        if batch.num_rows < _WHOLE * num_sessions:
            self._num_plain_rounds = 0  # sessions stand in groups, as after a probe, and will merge
        if self._num_plain_rounds <= ROUNDS_NOT_AHEAD or not batch.plain.seconds:
            return
        load_ratio = self.foreign.load_ratio(num_sessions)
        if load_ratio == 1.0 or rows == tokens >= _MOST * load_ratio * batch.num_rows:
            self.times.note_plain(round(load_ratio * batch.num_rows), batch.plain.seconds)

    def interrupt(self) -> None:
        """Prompts are computed meanwhile: a target begins anew to compute ahead."""
        self._num_plain_rounds = 0

    def _note_share(self, batch: VerdictBatch, num_sessions: int) -> None:
        if num_sessions < 2:
            return  # it has no other to stand in a group with
        share = min(1.0, batch.num_rows / num_sessions)
        self._num_shares += 1
        self.share += max(_NEWEST, 1.0 / self._num_shares) * (share - self.share)

    @property
    def knows_share(self) -> bool:
        """Whether rounds of several sessions told ``share``."""
        return self._num_shares > 0

    def knows(self, mode: Mode, num_sessions: int) -> bool:
        """Whether rounds of this mode and of about so many sessions were timed."""
        if mode is Mode.PLAIN:
            return self.times.num_plain(self.num_all(num_sessions)) >= _KNOWN_ROUNDS
        return self.times.num_speculative(self.share * self.num_all(num_sessions)) >= _KNOWN_ROUNDS

    def doublings_past_known(self, num_sessions: int) -> int | None:
        """How many times sessions have doubled since those with which speculation is known; None: it is not at all."""
        rows = self.share * self.num_all(num_sessions)
        return self.times.doublings_past_speculation(rows, least_rounds=_KNOWN_ROUNDS)

    @property
    def is_young(self) -> bool:
        """Whether nothing is known of speculation, or only what its first rounds of all took, which may mislead."""
        return self._num_speculative_rounds < _YOUNG_ROUNDS

    @property
    def num_cold_rounds(self) -> int:
        """Speculative rounds to come that are not counted."""
        return max(_COLD_ROUNDS - self._num_speculative_rounds, 0)

    def plain_seconds(self, num_sessions: int) -> float:
        """Expected duration of a plain round."""
        return self.times.plain(self.num_all(num_sessions))

    def num_all(self, num_sessions: int) -> float:
        """So many own sessions, and the foreign ones."""
        return num_sessions + self.foreign.num_sessions

    def share_of_all(self, num_sessions: int) -> float:
        """Rows of a speculative round over the own sessions: ``share``, with foreign rows above 1."""
        return self.share * self.foreign.load_ratio(num_sessions)
