"""Step costs of a target and its draft: the durations that services measured at start, and corrections to them.

A table gives the duration of a forward or a proposal by batch size, length and context. What it cannot know is learned
from traffic: a scale of the target's and of the draft's table, the ratio of plain rounds to their forward by batch
size, and the time between the forwards of speculative rounds by batch size. Durations are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from outrider.limits import MAX_DRAFT_LENGTH
from outrider.types import StepCost

_MAX_CORRECTION_RATIO = 0.15
"""Largest logarithm, or share of a round, by which one sample may differ: a process's first rounds take several times
as long as later ones."""
_NEWEST = 0.1
"""Weight of a sample once ten were seen; before that all count equally."""
_OVERHEAD_S, _OVERHEAD_S_A_ROW = 0.5e-3, 0.05e-3
"""Time between the forwards of a speculative round, and that of each session, until it was measured: of one GPU and a
host of average speed."""
_NOMINAL_TARGET = [StepCost(n, k, 0, 5_000_000 + 20_000 * n * k) for n, k in ((1, 1), (1, 9), (256, 1), (256, 9))]
_NOMINAL_DRAFT = [StepCost(1, 1, 0, 1_000_000), StepCost(1, 9, 0, 9_000_000)]
"""Costs of services that measured none: of an 8B model and of a 1B model on a GPU. Traffic corrects their scale."""
_TEXT_FACTOR = 2.0
"""Factor of the time of drafts' text: their forwards are small, and run beside the target's."""


class StepTable:
    """Measured durations of one service, interpolated linearly between batch sizes and lengths."""

    def __init__(self, costs: Iterable[StepCost]) -> None:
        """``costs`` may not be empty."""
        found = {(cost.num_rows, cost.num_tokens, cost.context_length): 1e-9 * cost.duration_ns for cost in costs}
        self._context = min(context for _, _, context in found)
        self._rows = sorted({rows for rows, _, context in found if context == self._context})
        self._curves = np.stack([self._measured_curve(found, rows) for rows in self._rows])  # [R, L]
        self._slopes = [self._measured_slope(found, rows) for rows in self._rows]
        self._known: dict[int, np.ndarray] = {}

    def seconds(self, rows: int, length: float, context: float = 0.0) -> float:
        """Duration of a step of ``rows`` sessions, of ``length`` tokens each behind ``context`` tokens in the cache."""
        return float(self.times(rows, np.array([length]), context)[0])

    def times(self, rows: int, lengths: np.ndarray, context: float) -> np.ndarray:  # [K] -> [K]
        """Duration with each length."""
        curve = self._curve(max(1, rows))
        more_s = max(context - self._context, 0.0) * float(np.interp(rows, self._rows, self._slopes))
        return np.asarray(np.interp(lengths, np.arange(len(curve)), curve) + more_s)

    @property
    def token_seconds(self) -> float:
        """Duration of each further token of a large forward, as of a prompt."""
        rows, length = self._rows[-1], self._curves.shape[1] - 1
        before = self._rows[-2] if len(self._rows) > 1 else 1
        more = float(self._curves[-1][length] - self._curve(before)[1])
        return float(max(more, 0.0) / (rows * length - before))

    def _curve(self, rows: int) -> np.ndarray:  # -> [L]
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = _interpolated(self._rows, self._curves, rows)
        return known

    def _measured_curve(self, found: dict[tuple[int, int, int], float], rows: int) -> np.ndarray:  # -> [L]
        points = sorted(
            (length, seconds)
            for (own, length, context), seconds in found.items()
            if own == rows and context == self._context
        )
        lengths, times = [length for length, _ in points], np.array([[seconds] for _, seconds in points])
        return np.array([_interpolated(lengths, times, length)[0] for length in range(MAX_DRAFT_LENGTH + 2)])

    def _measured_slope(self, found: dict[tuple[int, int, int], float], rows: int) -> float:
        """Seconds that a token of each session's context takes."""
        longer = [(context, length) for own, length, context in found if own == rows and context > self._context]
        if not longer:
            return 0.0
        context, length = max(longer)
        more = found[rows, length, context] - found.get((rows, length, self._context), math.inf)
        return max(0.0, more / (context - self._context))


def _interpolated(places: list[int], values: np.ndarray, place: float) -> np.ndarray:  # values [N, X] -> [X]
    """Value between the places, and past the last by the slope before it; never below the nearest measured value."""
    if len(places) == 1 or place <= places[0]:
        return np.asarray(values[0])
    last = min(int(np.searchsorted(places, place)), len(places) - 1)
    share = (place - places[last - 1]) / (places[last] - places[last - 1])
    slope = values[last] - values[last - 1]
    return np.asarray(values[last - 1] + share * (np.maximum(slope, 0.0) if share > 1.0 else slope))


class Average:
    """Mean of samples, the newest with more weight; each sample counts as at most ``limit`` away from the mean."""

    __slots__ = ("num_samples", "value")

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.num_samples = 0

    def note(self, sample: float, limit: float = math.inf) -> None:
        """Take in one sample."""
        self.num_samples += 1
        step = min(max(sample - self.value, -limit), limit)
        self.value += max(1.0 / self.num_samples, _NEWEST) * step


class StepCosts:
    """Expected durations of the rounds of one target's sessions."""

    def __init__(self, target: Sequence[StepCost] = (), draft: Sequence[StepCost] = ()) -> None:
        self._target, self._draft = StepTable(_NOMINAL_TARGET), StepTable(_NOMINAL_DRAFT)
        self._has_target = self._has_draft = False
        self.provide(target, draft)
        self._target_scale, self._draft_scale = Average(), Average()
        """Logarithms of measured over tabulated durations."""
        self._plain: dict[int, Average] = {}
        """The same of plain rounds, by bucket of rows."""
        self._overheads: dict[int, Average] = {}
        """Seconds between the forwards of speculative rounds, by bucket of rows."""

    def provide(self, target: Sequence[StepCost], draft: Sequence[StepCost]) -> None:
        """Take the tables of services that have told theirs since."""
        if target and not self._has_target:
            self._target, self._has_target = StepTable(target), True
        if draft and not self._has_draft:
            self._draft, self._has_draft = StepTable(draft), True

    # What was measured.

    def note_draft(self, rows: int, length: int, context: float, seconds: float) -> None:
        """Learn the duration of a proposal."""
        _note_ratio(self._draft_scale, seconds, self._draft.seconds(rows, length, context))

    def note_scoring(self, rows: int, length: float, context: float, seconds: float) -> None:
        """Learn the duration of a forward with ``length`` tokens a session, more than one."""
        _note_ratio(self._target_scale, seconds, self._target.seconds(rows, length, context))

    def note_plain_round(self, rows: int, context: float, seconds: float) -> None:
        """Learn the duration of a round without draft tokens."""
        average = self._plain.setdefault(bucket_of(rows), Average(self._plain_scale(rows)))
        _note_ratio(average, seconds, self._target.seconds(rows, 1, context))

    def note_speculative_round(self, rows: int, drafted: float, longest: int, context: float, seconds: float) -> None:
        """A round took so long in which each session drafted, ``drafted`` tokens in the mean."""
        average = self._overheads.setdefault(bucket_of(rows), Average(self.overhead(rows)))
        forwards = float(self._forwards(rows, context, np.array([longest]), np.array([drafted]))[0])
        average.note(seconds - forwards, _MAX_CORRECTION_RATIO * (forwards + average.value))

    # What is expected.

    @property
    def has_profile(self) -> bool:
        """True if both services have told what they measured."""
        return self._has_target and self._has_draft

    def num_speculative_rounds(self, rows: int) -> int:
        """Number of speculative rounds measured in this bucket of rows."""
        average = self._overheads.get(bucket_of(rows))
        return 0 if average is None else average.num_samples

    @property
    def scored_token_seconds(self) -> float:
        """Duration of each token of text that the target computes again for a draft that reads its hidden states."""
        return self._target.token_seconds

    @property
    def text_token_seconds(self) -> float:
        """Duration of each token of text that a draft takes in: the target's, by the ratio of their smallest steps.

        Not learned: a process's first forward of text takes a hundred times as long, and others wait for the target's.
        """
        return _TEXT_FACTOR * self._target.token_seconds * self._draft.seconds(1, 1) / self._target.seconds(1, 1)

    def longest_within_forward(self, rows: int, context: float) -> int:
        """Largest draft length of which one token more is drawn within a forward of the target; 1 at least."""
        lengths = np.arange(2, MAX_DRAFT_LENGTH + 1)
        draft_s = math.exp(self._draft_scale.value) * self._draft.times(rows, lengths, context)
        forward_s = math.exp(self._target_scale.value) * self._target.times(rows, lengths, context)
        is_longer = draft_s > forward_s
        return max(1, int(is_longer.argmax())) if is_longer.any() else MAX_DRAFT_LENGTH

    def plain(self, rows: int, context: float) -> float:
        """Duration of a plain round."""
        return math.exp(self._plain_scale(rows)) * self._target.seconds(rows, 1, context)

    def speculative(self, rows: int, context: float, drafted: np.ndarray) -> np.ndarray:  # [K] -> [K]
        """Duration of rounds with each draft length; ``drafted``: draft tokens of a session in the mean."""
        return self.overhead(rows) + self._forwards(rows, context, np.arange(1, len(drafted) + 1), drafted)

    def overhead(self, rows: int) -> float:
        """Time between the forwards of a speculative round."""
        nearest_s = _nearest(self._overheads, rows)
        return _OVERHEAD_S + _OVERHEAD_S_A_ROW * rows if nearest_s is None else nearest_s

    def _forwards(self, rows: int, context: float, longest: np.ndarray, drafted: np.ndarray) -> np.ndarray:  # all [K]
        draft = math.exp(self._draft_scale.value) * self._draft.times(rows, longest, context)
        return np.asarray(draft + self._scoring_scale(rows) * self._target.times(rows, 1.0 + drafted, context))

    def _plain_scale(self, rows: int) -> float:
        nearest = _nearest(self._plain, rows)
        return self._target_scale.value if nearest is None else nearest

    def _scoring_scale(self, rows: int) -> float:
        """Ratio of measured time to the table's; plain rounds give it before any forward with draft tokens was
        measured.
        """
        return math.exp(self._target_scale.value if self._target_scale.num_samples else self._plain_scale(rows))


def bucket_of(rows: int) -> int:
    """Bucket of a number of rows: its power of two."""
    return max(rows, 1).bit_length()


def _nearest(averages: dict[int, Average], rows: int) -> float | None:
    """The average measured with the most similar number of rows."""
    if not averages:
        return None
    own = bucket_of(rows)
    return averages[min(averages, key=lambda known: (abs(known - own), known))].value


def _note_ratio(average: Average, measured: float, expected: float) -> None:
    if measured > 0.0 and expected > 0.0:
        average.note(math.log(measured / expected), _MAX_CORRECTION_RATIO)
