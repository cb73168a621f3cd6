"""Joint verdicts: sparse rejection of many sessions' proposals at once, as ``rejection`` judges each, bit by bit.

All that does not depend on the scores is computed while the target computes: which rows belong together, where draft
tokens are in their supports, and the random numbers. Wherever scores are not in order, or a draw is a border case, the
answer is that each has to be judged alone.

Shape letters: ``C`` proposals (cases), ``R`` draft tokens of all of them (rows), ``N`` ids of all supports, ``J`` cases
with a rejection, ``S`` ids of the widest support.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.batched import U4, AnswerBatch, ragged
from outrider.randomness.philox_numpy import uniform
from outrider.randomness.streams import Stream
from outrider.types import FloatArray, IntArray, SparseEvidence
from outrider.values import step_value
from outrider_coordinator.acceptance.vectorized import TARGET_SUM_TOLERANCE, Doubles, Indices, SupportRows, are_near_1

_NO_REJECTION = 1 << 40
"""Position past any draft length: no token of the case was rejected."""


class JointVerdicts:
    """Verdicts on checked proposals, once their scores are there."""

    def __init__(self, rows: SupportRows, limits: Indices, coins: Doubles) -> None:  # [C], [2, R]
        """``limits``: of token ids. ``coins``: of each draft token, those of its acceptance and of a draw behind it."""
        self._rows, self._limits, self._coins, (self._accepting, self._drawing) = rows, limits, coins, coins
        self._score_limits = limits.repeat(rows.num_rows + 1)  # [R+C]
        self._judged = np.arange(rows.counts.size) + rows.cases  # [R] the draft tokens' scores among all positions
        self._lasts = (rows.num_rows + 1).cumsum() - 1  # [C] those of the position after each proposal
        self._drafted = rows.where_drafted
        self._probs = rows.probs[self._drafted].astype(np.float64)
        self._sizes = np.add.reduceat(rows.counts, rows.firsts).tolist()  # [C] ids in the supports of each case

    @classmethod
    def of(
        cls, rows: SupportRows, *, limits: Indices, seeds: NDArray[np.uint64], bases: Indices
    ) -> JointVerdicts:  # [C]
        """Judge with the random numbers of sessions with these seeds, whose proposals begin at ``bases``."""
        bases = bases[rows.cases]
        streams = np.array([[Stream.ACCEPTANCE], [Stream.RESIDUAL]])
        return cls(rows, limits, uniform(seeds[rows.cases], streams, bases, bases + rows.steps))

    @classmethod
    def joined(cls, parts: Sequence[JointVerdicts]) -> JointVerdicts:
        """Verdicts on the cases of all parts."""
        rows = SupportRows.joined([part._rows for part in parts])
        limits = np.concatenate([part._limits for part in parts])
        return cls(rows, limits, np.concatenate([part._coins for part in parts], axis=1))

    def selected(self, cases: Indices) -> JointVerdicts:
        """Verdicts on these cases alone."""
        coins = self._coins[:, ragged(self._rows.num_rows, cases)]
        return JointVerdicts(self._rows.selected(cases), self._limits[cases], coins)

    def on_arrays(self, scores: AnswerBatch[object]) -> tuple[Indices, Indices] | None:
        """``on`` scores that came as arrays, with one more than each proposal has tokens."""
        if scores.outside_masses is None or scores.supports is None:
            return None
        if scores.supports.counts.tolist() != self._sizes:
            return None
        return self.on(scores.supports.probs, scores.outside_masses, scores.token_ids)

    def on(
        self, inside: FloatArray, outside: FloatArray, drawn: IntArray
    ) -> tuple[Indices, Indices] | None:  # [N], [R+C], [R+C]
        """Number of accepted tokens by case [C], and the token after them; None where each has to be judged alone.

        ``inside``: the target's probabilities of the supports' ids. ``outside``: its mass outside them. ``drawn``: a
        token from there.
        """
        if not self._are_sound(inside, outside, drawn):
            return None
        num_rows = self._rows.num_rows
        ratios = inside[self._drafted] / self._probs
        rejections = np.where(self._accepting >= ratios, self._rows.steps, _NO_REJECTION)
        accepted: Indices = np.minimum(np.minimum.reduceat(rejections, self._rows.firsts), num_rows)
        following = drawn[self._lasts].astype(np.int64)
        ending = (accepted < num_rows).nonzero()[0]
        if ending.size:
            stops = (self._rows.firsts + accepted)[ending]
            recovered = self._draw_recovered(inside, outside[self._judged[stops]], drawn[self._judged[stops]], stops)
            if recovered is None:
                return None
            following[ending] = recovered
        return accepted, following

    def _are_sound(self, inside: FloatArray, outside: FloatArray, drawn: IntArray) -> bool:
        sums = outside.astype(np.float64)
        sums[self._judged] += self._rows.sums(inside)
        # The lowest of numbers with NaN among them is NaN.
        return bool(
            inside.item(inside.argmin()) >= 0
            and outside.item(outside.argmin()) >= 0
            and are_near_1(sums, TARGET_SUM_TOLERANCE)
            and self._are_drawn(outside, drawn)
        )

    def _are_drawn(self, outside: FloatArray, drawn: IntArray) -> bool:
        """True if there is a token wherever one may be needed: behind a proposal, and where there is mass outside."""
        lacks = drawn.astype(U4, copy=False) >= self._score_limits  # a negative one is high
        return 1 not in lacks.tobytes() or not (lacks[self._lasts].any() or (outside[lacks] > 0).any())

    def _draw_recovered(
        self, inside: FloatArray, outside: FloatArray, drawn: IntArray, stops: Indices
    ) -> Indices | None:  # [N], [J], [J], [J]
        """A token from (target - draft)+ at each row of ``stops``; None when one is empty or ends past its sum."""
        rows, each = self._rows, np.arange(len(stops))
        counts = rows.counts[stops]
        at = np.arange(counts.item(counts.argmax()) + 1)
        indices = np.minimum(rows.starts[stops][:, None] + at, len(rows.ids) - 1)  # [J, S + 1]
        drafts = np.where(at < counts[:, None], rows.probs[indices], np.inf).astype(np.float64, copy=False)
        # Behind its support each row has the mass outside, then nothing.
        weights = np.maximum(inside[indices] - drafts, 0.0)
        weights[each, counts] = outside
        sums = weights.cumsum(axis=1)
        chosen = (sums <= (self._drawing[stops] * sums[:, -1])[:, None]).sum(axis=1)  # as searchsorted on the right
        if 1 in (chosen > counts).tobytes():
            return None
        return np.where(chosen < counts, rows.ids[indices[each, chosen]], drawn)


class SupportedProposals:
    """Sound proposals of one message with their supports; what verdicts on them need is computed once."""

    def __init__(self, rows: SupportRows, *, limits: Indices, seeds: NDArray[np.uint64], bases: Indices) -> None:  # [C]
        self.rows, self._limits, self._seeds, self._bases = rows, limits, seeds, bases

    @functools.cached_property
    def verdicts(self) -> JointVerdicts:
        """Verdicts on all of the proposals."""
        return JointVerdicts.of(self.rows, limits=self._limits, seeds=self._seeds, bases=self._bases)

    def evidence(self, case: int) -> SparseEvidence:
        """Evidence of one proposal."""
        rows, start = self.rows, self.rows.firsts.item(case)
        end = start + rows.num_rows.item(case)
        first = rows.starts.item(start)
        ids = slice(first, first + int(rows.counts[start:end].sum()))
        return SparseEvidence(rows.counts[start:end].astype(np.int32), rows.ids[ids], rows.probs[ids])


@step_value(frozen=True, slots=True)
class PlacedEvidence:
    """Evidence of one proposal of a message."""

    proposals: SupportedProposals
    case: int

    @property
    def evidence(self) -> SparseEvidence:
        """Evidence of a session by itself."""
        return self.proposals.evidence(self.case)


def verdicts_on(placed: Sequence[PlacedEvidence]) -> JointVerdicts:
    """Verdicts on these proposals: mostly all of one message, in its order."""
    first = placed[0].proposals
    cases = [one.case for one in placed if one.proposals is first]
    if len(cases) == len(placed):
        is_whole = cases == list(range(len(first.rows.num_rows)))
        return first.verdicts if is_whole else first.verdicts.selected(np.array(cases))
    groups: dict[int, list[int]] = {}
    for place, one in enumerate(placed):
        groups.setdefault(id(one.proposals), []).append(place)
    parts = [
        placed[own[0]].proposals.verdicts.selected(np.array([placed[i].case for i in own])) for own in groups.values()
    ]
    order = np.argsort(np.concatenate([np.array(own) for own in groups.values()]))
    return JointVerdicts.joined(parts).selected(order)
