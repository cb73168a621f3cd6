"""The cycle and where a draft leaves it: arithmetic alone, at the size of real vocabularies."""

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.model_executor.synthetic.cycle import Flags, PairMap, build_map

VOCABULARIES = (1024, 128256, 151936)


def window_shares(flags: Flags, length: int) -> NDArray[np.float64]:
    """The share of true flags in every window of a walk round the cycle."""
    around = np.concatenate([flags, np.resize(flags, length)]).astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(around)])
    shares: NDArray[np.float64] = (sums[length:] - sums[:-length]) / length
    return shares


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_target_is_one_cycle_over_the_whole_vocabulary(vocab_size: int) -> None:
    pair = build_map(vocab_size, acceptance=0.75)
    assert np.array_equal(np.sort(pair.order), np.arange(vocab_size))
    assert np.array_equal(pair.target_next[pair.order], np.roll(pair.order, -1))
    assert np.array_equal(np.sort(pair.draft_next), np.arange(vocab_size)), "the draft's is a permutation too"


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.74, 0.9, 0.995, 1.0])
def test_any_ten_thousand_tokens_have_the_acceptance_within_a_hundredth(vocab_size: int, acceptance: float) -> None:
    pair = build_map(vocab_size, acceptance=acceptance, seed=3)
    shares = window_shares(pair.agrees[pair.order], 10_000)
    assert np.abs(shares - acceptance).max() <= 0.01


def accepted_per_step(pair: PairMap, num_draft_tokens: int, num_steps: int) -> NDArray[np.int64]:
    """Accepted tokens of K proposed ones, step after step, on a walk of the cycle."""
    agrees, position, counts = pair.agrees[pair.order], 0, []
    for _ in range(num_steps):
        ahead = agrees[(position + np.arange(num_draft_tokens)) % len(agrees)]
        counts.append(num_draft_tokens if ahead.all() else int(np.argmin(ahead)))
        position += counts[-1] + 1
    return np.array(counts)


def test_runs_of_accepted_tokens_have_the_lengths_of_independent_draws() -> None:
    acceptance, num_draft_tokens = 0.75, 4
    counts = accepted_per_step(build_map(128256, acceptance=acceptance), num_draft_tokens, 10_000)
    shares = np.bincount(counts, minlength=num_draft_tokens + 1) / len(counts)
    rejected_at = acceptance ** np.arange(num_draft_tokens) * (1 - acceptance)
    assert shares == pytest.approx([*rejected_at, acceptance**num_draft_tokens], abs=0.015)
    # Judged are the accepted tokens and, unless all were accepted, the one that was not.
    judged = counts.sum() + (counts < num_draft_tokens).sum()
    assert counts.sum() / judged == pytest.approx(acceptance, abs=0.01)


def test_the_foreseen_share_is_of_the_disagreements_alone() -> None:
    pair = build_map(128256, acceptance=0.75, foreseen=0.6)
    assert not (pair.foreseen & pair.agrees).any()
    assert pair.foreseen[~pair.agrees].mean() == pytest.approx(0.6, abs=1e-3)


def test_the_target_depends_on_the_seed_and_not_on_the_draft() -> None:
    first, second = build_map(1024, acceptance=0.5), build_map(1024, acceptance=0.9, foreseen=1.0)
    assert np.array_equal(first.target_next, second.target_next)
    assert not np.array_equal(first.target_next, build_map(1024, acceptance=0.5, seed=1).target_next)


@pytest.mark.parametrize(("acceptance", "foreseen"), [(1.1, 0.0), (-0.1, 0.0), (0.5, 2.0), (float("nan"), 0.0)])
def test_shares_outside_zero_to_one_are_refused(acceptance: float, foreseen: float) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        build_map(1024, acceptance=acceptance, foreseen=foreseen)


def test_the_acceptance_may_change_in_the_middle_of_the_cycle() -> None:
    pair, even = (build_map(128256, acceptance=0.9, later_acceptance=later) for later in (0.3, None))
    first, second = np.split(pair.agrees[pair.order], 2)
    assert (first.mean(), second.mean()) == (pytest.approx(0.9, abs=1e-3), pytest.approx(0.3, abs=1e-3))
    assert np.array_equal(pair.target_next, even.target_next), "the target's text stays"
