# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Routing on a GPU: the most probable experts of each token, and the tiles of pairs that share an expert.

The host waits for nothing: there are as many tiles as any routing of this many tokens can need, and those that are not
needed have no pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.experts.layout import Routing, SigmoidScores, TokenTiles
from outrider.kernels.launching import launch_options

_BLOCK = 1024
"""Pairs that are read together."""
_TILES = tl.constexpr(128)
"""Tiles that are written together."""
_NEVER = tl.constexpr(float("-inf"))
_LARGEST = tl.constexpr(1e38)
"""Largest logit: the difference of two is a number."""


@triton.jit
def _within_groups(ranks, expert, SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, CHOSEN: tl.constexpr):
    """``ranks`` [E], those of experts in groups of ``SIZE`` that are not chosen -inf."""
    group, sums = expert // SIZE, tl.zeros_like(ranks)
    for number in tl.static_range(NUM_GROUPS):
        own = tl.where(group == number, ranks, _NEVER)
        best = tl.max(own, 0)
        place = tl.min(tl.where(own == best, expert, NUM_GROUPS * SIZE), 0)
        second = tl.max(tl.where(expert == place, _NEVER, own), 0)
        sums = tl.where(group == number, best + second, sums)
    num_better = tl.zeros_like(expert)
    for number in tl.static_range(NUM_GROUPS):
        other = tl.max(tl.where(group == number, sums, _NEVER), 0)
        num_better += ((other > sums) | ((other == sums) & (number < group))).to(tl.int32)
    return tl.where(num_better < CHOSEN, ranks, _NEVER)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E] float32, of sigmoids
    ids_ptr,  # [A, T] int32
    weights_ptr,  # [A, T] float32
    order_ptr,  # [P] int32
    tiles_ptr,  # [M, 3] int32
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # 0: weights are softmax
    GROUPS_CHOSEN: tl.constexpr,
    SCALE: tl.constexpr,
    IS_ALONE: tl.constexpr,  # one token: every pair is a tile
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    expert, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_A)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=float("-inf"))
    # What is no number, as in rows that fill up a graph, becomes one: compilers take it that an exp is at least 0.
    logits = tl.where(logits == logits, logits.to(tl.float32), -_LARGEST)  # noqa: PLR0124
    logits = tl.minimum(tl.maximum(logits, -_LARGEST), _LARGEST)
    if NUM_GROUPS > 0:
        masses = 1.0 / (1.0 + tl.exp(-logits))
        left = masses + tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
        left = tl.where(expert < NUM_EXPERTS, left, _NEVER)
        if NUM_GROUPS > 1:
            left = _within_groups(left, expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, GROUPS_CHOSEN)
    else:
        masses = tl.exp(logits - tl.max(logits, 0))
        left = tl.where(expert < NUM_EXPERTS, masses, _NEVER)
    chosen = tl.zeros([BLOCK_A], tl.float32)
    ids = tl.zeros([BLOCK_A], tl.int32)
    for number in tl.static_range(NUM_CHOSEN):
        largest = tl.max(left, 0)
        best = tl.min(tl.where(left == largest, expert, BLOCK_E), 0)
        weight = largest if NUM_GROUPS == 0 else tl.max(tl.where(expert == best, masses, 0.0), 0)
        chosen = tl.where(place == number, weight, chosen)
        ids = tl.where(place == number, best, ids)
        left = tl.where(expert == best, _NEVER, left)
    total = tl.sum(chosen, 0) + 1e-20 if NORMALIZES else tl.sum(masses, 0) if NUM_GROUPS == 0 else 1.0
    inside = place < NUM_CHOSEN
    tl.store(ids_ptr + place * num_tokens + token, ids, mask=inside)
    tl.store(weights_ptr + place * num_tokens + token, chosen / total * SCALE, mask=inside)
    if IS_ALONE:
        tl.store(order_ptr + place, place, mask=inside)
        tl.store(tiles_ptr + place * 3, ids, mask=inside)
        tl.store(tiles_ptr + place * 3 + 1, place, mask=inside)
        tl.store(tiles_ptr + place * 3 + 2, tl.full([BLOCK_A], 1, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _tile_kernel(
    ids_ptr,  # [P] int32
    order_ptr,  # [P] int32
    tiles_ptr,  # [M, 3] int32
    num_pairs,
    num_tiles,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each expert: it counts all pairs, and sorts those of its expert."""
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0)
        counts += tl.histogram(ids, BLOCK_E, mask=pair < num_pairs)
    tiles = (counts + WIDTH - 1) // WIDTH
    start = tl.sum(tl.where(expert < own, counts, 0), 0)
    count = tl.sum(tl.where(expert == own, counts, 0), 0)
    tile = tl.sum(tl.where(expert < own, tiles, 0), 0)
    place = start
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_own = (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    for first in range(0, (count + WIDTH - 1) // WIDTH, _TILES):
        number = first + tl.arange(0, _TILES)
        inside = number * WIDTH < count
        row = tiles_ptr + (tile + number) * 3
        tl.store(row, number * 0 + own, mask=inside)
        tl.store(row + 1, start + number * WIDTH, mask=inside)
        tl.store(row + 2, tl.minimum(count - number * WIDTH, WIDTH), mask=inside)
    if own == 0:
        for first in range(tl.sum(tiles, 0), num_tiles, _TILES):
            number = first + tl.arange(0, _TILES)
            tl.store(tiles_ptr + number * 3 + 2, number * 0, mask=number < num_tiles)


def route(
    logits: torch.Tensor, num_chosen: int, *, normalizes: bool, width: int, scores: SigmoidScores | None = None
) -> Routing:
    """Routing as in the reference; pairs lie in tiles of at most ``width``."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * num_chosen
    ids, order = (torch.empty(num_pairs, dtype=torch.int32, device=logits.device) for _ in range(2))
    weights = torch.empty(num_chosen, num_tokens, dtype=torch.float32, device=logits.device)
    num_tiles = most_tiles(num_pairs, num_experts, width)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=logits.device)
    routing = Routing(ids.view(num_chosen, num_tokens), weights, TokenTiles(order, tiles, width))
    if not num_tokens:
        return routing
    block, is_alone = triton.next_power_of_2(num_experts), num_tokens == 1
    groups, groups_chosen, scale, bias = 0, 0, 1.0, logits
    if scores is not None:
        groups, groups_chosen, scale, bias = scores.num_groups, scores.num_groups_chosen, scores.scale, scores.bias
    _route_kernel[(num_tokens,)](
        logits, bias, ids, weights, order, tiles, num_tokens, NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen,
        NORMALIZES=normalizes, NUM_GROUPS=groups, GROUPS_CHOSEN=groups_chosen, SCALE=scale, IS_ALONE=is_alone,
        BLOCK_E=block, BLOCK_A=triton.next_power_of_2(num_chosen),
        num_warps=1 if block <= 256 else 4, **launch_options(logits),
    )  # fmt: skip
    if not is_alone:
        _tile_kernel[(num_experts,)](
            ids, order, tiles, num_pairs, num_tiles, WIDTH=width, BLOCK_E=block,
            BLOCK=min(_BLOCK, max(128, triton.next_power_of_2(num_pairs))), **launch_options(logits),
        )  # fmt: skip
    return routing


def most_tiles(num_pairs: int, num_experts: int, width: int) -> int:
    """Tiles of any routing of as many pairs at most."""
    return min(num_pairs, num_pairs // width + num_experts)
