"""Step time model: forwards by rows and tokens, and the time in between, fitted to recent steps.

Owns the models of time of one target and its draft. All times are in seconds, all observations come as events; no clock
is read here. A *round* is one step of the sessions that share forwards, from one verdict of a session to its next.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider_coordinator.speculation.estimates.linear_fit import LinearFit

_NUM_KEPT = 17
"""Rounds of a kind that are kept."""
_NUM_TRIMMED = 4
"""One in so many of those, at either end, is left out of the mean: a few rounds are held up by something else."""
_PRIOR_ROUNDS = 2.0
"""Rounds that count for the linear models where those and what was seen of one length differ."""


@dataclass(frozen=True, slots=True)
class RoundPrice:
    """Expected duration of speculative rounds by their drafted tokens, in seconds.

    Both models' forwards come one after the other, scoring takes no less than a plain round, and drafting no less than
    no time, as a line through few points may say: where times scatter, a draft of no use must not seem to pay.
    """

    scoring: float
    """Besides the draft's proposals, without a drafted token."""
    per_scored_token: float
    plain: float = 0.0
    """A plain round."""
    drafting: float = 0.0
    """The draft's proposals, but for what they take by tokens."""
    per_drafted_token: float = 0.0

    def at(self, drafted: float) -> float:
        """Seconds of a round with so many drafted tokens, of all rows."""
        drafting = max(self.drafting + self.per_drafted_token * drafted, 0.0)
        return drafting + max(self.scoring + self.per_scored_token * drafted, self.plain)


class _Seen:
    """The latest rounds of about so many rows and with one draft length."""

    __slots__ = ("_rounds", "count", "drafted", "rows", "seconds")

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int, float]] = deque(maxlen=_NUM_KEPT)
        self.rows = self.drafted = self.seconds = 0.0
        self.count = 0

    def note(self, rows: int, drafted: int, seconds: float) -> None:
        """One more."""
        self._rounds.append((rows, drafted, seconds))
        self.count += 1
        self.rows, self.drafted, self.seconds = map(_trimmed_mean, zip(*self._rounds, strict=True))


def _trimmed_mean(values: Sequence[float]) -> float:
    trimmed = len(values) // _NUM_TRIMMED
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


class StepTimes:
    """Expected durations of plain and speculative rounds.

    Where rounds of about so many rows and of this draft length were seen, what those took; elsewhere, and for what lies
    beside them, linear models of

    * the target's forward: a constant, a part by rows, a part by tokens;
    * the draft's proposals: a constant, a part by draft length, a part by drafted tokens of all rows;
    * what lies between them in a speculative round: a constant and a part by rows. It is what the round took besides
      both forwards, so the sum is what was measured, whatever the forwards' reports leave out;
    * a plain round as a whole, by rows: the target computes plain steps before they are asked for, so that nothing of
      it lies between forwards.
    """

    def __init__(self) -> None:
        self._plain = LinearFit((0.9, 0.005), (0.5, 0.02))
        self._seen: defaultdict[int, dict[int, _Seen]] = defaultdict(dict)
        """By magnitude of the rows, then by draft length; 0 is plain."""
        self._target = LinearFit((0.7, 0.002, 0.005), (0.5, 0.01, 0.02))
        self._draft = LinearFit((0.1, 0.2, 0.002), (0.5, 0.3, 0.02))
        self._between = LinearFit((0.7, 0.02), (1.0, 0.05))

    def forget_speculation(self, rows: float) -> None:
        """Time speculative rounds of about so many rows anew. What those of other numbers took stays known."""
        for fit in (self._target, self._draft, self._between):
            fit.fade()
        lengths = self._seen[_magnitude(rows)]
        for length in [length for length in lengths if length]:
            del lengths[length]

    def note_target(self, rows: int, tokens: int, seconds: float) -> None:
        """A forward of the target that scored proposals."""
        self._target.note((1.0, rows, tokens), seconds)

    def note_draft(self, draft_length: int, tokens: int, seconds: float) -> None:
        """Proposals drawn together: the longest one's length, and the drafted tokens of all."""
        self._draft.note((1.0, draft_length, tokens), seconds)

    def note_plain(self, rows: int, seconds: float) -> None:
        """A round without drafts."""
        self._plain.note((1.0, rows), seconds)
        self._seen_of(rows, 0).note(rows, 0, seconds)

    def note_speculative(self, rows: int, draft_length: int, drafted: int, seconds: float) -> None:
        """A round in which proposals were scored: its rows, the longest proposal, and the drafted tokens of all."""
        between = seconds - self._forwards(rows, draft_length, drafted)
        self._between.note((1.0, rows), max(between, 0.0))
        self._seen_of(rows, draft_length).note(rows, drafted, seconds)

    def note_between(self, rows: int, seconds: float) -> None:
        """What lay between the forwards of a round in which a few of so many sessions drafted."""
        self._between.note((1.0, rows), seconds)

    def plain(self, rows: float) -> float:
        """Expected seconds of a plain round; before any was seen, of the target's forward."""
        if not self._plain.num_observations:
            return self._target.predict((1.0, rows, rows))
        seen = self._seen[_magnitude(rows)].get(0)
        beside = 0.0 if seen is None else seen.seconds - self._plain.predict((1.0, seen.rows))
        return self._plain.predict((1.0, rows)) + beside

    def plain_of_few(self, most_rows: float) -> float:
        """Seconds of the plain rounds of the fewest rows that were seen; 0 where all had more than ``most_rows``."""
        seen = [each[0] for each in self._seen.values() if 0 in each]
        fewest = min(seen, key=lambda each: each.rows, default=None)
        return fewest.seconds if fewest is not None and fewest.rows <= most_rows else 0.0

    def speculative(self, rows: float, draft_length: int) -> RoundPrice:
        """Expected seconds of a speculative round, by its drafted tokens."""
        target, draft = self._target.coefficients, self._draft.coefficients
        drafting = draft[0] + draft[1] * draft_length
        scoring = self._target.predict((1.0, rows, rows)) + self._between.predict((1.0, rows))
        return RoundPrice(scoring + self._beside(rows, draft_length), target[2], self.plain(rows), drafting, draft[2])

    def longest_forward(self, rows: float, draft_length: int, drafted: float) -> float:
        """Expected seconds of the longer one of the target's forward and the draft's proposals."""
        target = self._target.predict((1.0, rows, rows + drafted))
        return max(target, self._draft.predict((1.0, draft_length, drafted)))

    def _beside(self, rows: float, draft_length: int) -> float:
        """What rounds of the nearest length took besides what the linear models expect of them."""
        lengths = self._seen[_magnitude(rows)]
        nearest = min((length for length in lengths if length), key=lambda k: abs(k - draft_length), default=None)
        if nearest is None:
            return 0.0
        seen = lengths[nearest]
        trust = seen.count / (seen.count + _PRIOR_ROUNDS)
        return trust * (seen.seconds - self._linear(seen.rows, nearest, seen.drafted))

    def fitted_ms(self) -> dict[str, list[float]]:
        """The linear models' coefficients in milliseconds, for a log: constants, then parts by rows, tokens or length
        as the class has them.
        """
        fits = {"target_ms": self._target, "draft_ms": self._draft, "between_ms": self._between}
        return {name: [round(1e3 * part, 3) for part in fit.coefficients] for name, fit in fits.items()}

    @property
    def seconds_a_scored_token(self) -> float:
        """What one more token of a forward of the target takes."""
        return self._target.coefficients[2]

    def num_plain(self, rows: float) -> int:
        """Plain rounds of about so many rows that were seen."""
        seen = self._seen[_magnitude(rows)].get(0)
        return 0 if seen is None else seen.count

    def num_speculative(self, rows: float) -> int:
        """Speculative rounds of about so many rows that were seen."""
        return sum(seen.count for length, seen in self._seen[_magnitude(rows)].items() if length)

    def doublings_past_speculation(self, rows: float, *, least_rounds: int) -> int | None:
        """How many times rows have doubled since those with which speculation was timed; below 0 with fewer than those.

        None unless there were ``least_rounds`` with about equally many rows.
        """
        counts = {key: sum(seen.count for length, seen in each.items() if length) for key, each in self._seen.items()}
        known = [magnitude for magnitude, count in counts.items() if count >= least_rounds]
        return _magnitude(rows) - max(known) if known else None

    def _seen_of(self, rows: int, draft_length: int) -> _Seen:
        return self._seen[_magnitude(rows)].setdefault(draft_length, _Seen())

    def _linear(self, rows: float, draft_length: int, drafted: float) -> float:
        return self._forwards(rows, draft_length, drafted) + self._between.predict((1.0, rows))

    def _forwards(self, rows: float, draft_length: int, drafted: float) -> float:
        target = self._target.predict((1.0, rows, rows + drafted))
        return target + max(self._draft.predict((1.0, draft_length, drafted)), 0.0)


def _magnitude(rows: float) -> int:
    """Numbers of rows that differ by less than about two have the same."""
    return max(1, round(rows)).bit_length()
