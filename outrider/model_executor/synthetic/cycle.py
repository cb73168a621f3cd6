"""The cycle that greedy decoding walks, and where a draft leaves it.

Owns the two functions token -> next token, the target's and the draft's, as permutations of the vocabulary. Plain
numpy; knows no model.

The target's is one cycle over the whole vocabulary, in hashed order. The draft's agrees with it on a share of the
tokens, the acceptance asked for. Which tokens those are is drawn by hash, block by block of consecutive cycle
positions: every block has the share to the nearest token, what rounding leaves over is carried on, and so any 10,000
tokens of a walk come within 0.01 of it, which independent draws would not (their standard deviation there is 0.004).
Inside a block the disagreements fall as a hash lets them, so that runs of accepted tokens have nearly the lengths of
independent draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]
Flags = NDArray[np.bool_]

BLOCK = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class PairMap:
    """Next token of each model of a pair, for every token."""

    order: TokenIds  # [V] the cycle comes first: order[i + 1] follows order[i]
    target_next: TokenIds  # [V] by token
    draft_next: TokenIds  # [V] by token
    foreseen: Flags  # [V] by token: the draft is wrong here, and the true token is its second choice

    @property
    def agrees(self) -> Flags:
        """[V] by token: the draft's first choice is the target's."""
        return np.equal(self.draft_next, self.target_next)


def build_map(
    vocab_size: int,
    *,
    acceptance: float,
    foreseen: float = 0.0,
    seed: int = 0,
    cycle_size: int | None = None,
    later_acceptance: float | None = None,
) -> PairMap:
    """The map of a pair; `foreseen` is the share of disagreements where the true token is the draft's second choice,
    and `later_acceptance` the acceptance in the second half of the cycle.

    The target's part depends on vocabulary, seed and `cycle_size` alone: of this many tokens, all by default, is the
    cycle, which is what a draft with a reduced vocabulary needs; each other token leads into it.
    """
    later = acceptance if later_acceptance is None else later_acceptance
    _check(vocab_size, acceptance, later, foreseen)
    size = vocab_size if cycle_size is None else cycle_size
    if not 2 <= size <= vocab_size:
        raise ValueError(f"a cycle has 2 to {vocab_size} tokens, not {size}")
    order = np.argsort(_hash(np.arange(vocab_size), seed, 1), kind="stable").astype(np.int64)
    cycle = order[:size]
    target_next = np.empty_like(order)
    target_next[order] = cycle[(np.arange(vocab_size) + 1) % size]
    keys = _hash(cycle, seed, 2)
    if later == acceptance:
        wrong_at = _choose(keys, 1.0 - acceptance)
    else:
        half = size // 2
        halves = _choose(keys[:half], 1.0 - acceptance), half + _choose(keys[half:], 1.0 - later)
        wrong_at = np.concatenate(halves)
    if len(wrong_at) == 1:  # a single token has none to change places with
        wrong_at = wrong_at[:0]
    wrong = cycle[wrong_at]
    draft_next = target_next.copy()
    draft_next[wrong] = target_next[_changed_places(wrong, seed)]
    is_foreseen = np.zeros(vocab_size, dtype=np.bool_)
    is_foreseen[wrong[_choose(_hash(wrong, seed, 4), foreseen)]] = True
    return PairMap(order, target_next, draft_next, is_foreseen)


def _check(vocab_size: int, acceptance: float, later: float, foreseen: float) -> None:
    if vocab_size < 2:
        raise ValueError(f"a vocabulary of {vocab_size} has no cycle")
    for name, share in (("acceptance", acceptance), ("later_acceptance", later), ("foreseen", foreseen)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}: must be from 0 to 1, not {share}")


def _changed_places(wrong: TokenIds, seed: int) -> TokenIds:
    """[W] for each wrong token the one whose successor it takes: never itself, each once, in hashed order."""
    shuffled = np.argsort(_hash(wrong, seed, 3), kind="stable")
    takes = np.empty_like(wrong)
    takes[shuffled] = wrong[np.roll(shuffled, -1)]
    return takes


def _choose(keys: NDArray[np.uint64], share: float) -> TokenIds:
    """Indices of a share of the keys: in every block those with the lowest."""
    chosen: list[TokenIds] = []
    for begin in range(0, len(keys), BLOCK):
        block = keys[begin : begin + BLOCK]
        count = round(share * (begin + len(block))) - sum(map(len, chosen))
        chosen.append(begin + np.sort(np.argsort(block, kind="stable")[:count]).astype(np.int64))
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def _hash(values: NDArray[np.int64], seed: int, stream: int) -> NDArray[np.uint64]:
    """splitmix64 of a value under a seed; streams are independent of each other."""
    return _mix(values.astype(np.uint64) + _mix(np.array([seed * 8 + stream], dtype=np.uint64)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
