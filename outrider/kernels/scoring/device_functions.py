# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Device functions of the scoring kernels: a row's words, its logits, exponentials and noise.

Everything is in bits, not nats: a GPU has one instruction for a base-2 logarithm and one for a power of two, each right
to two units in the last place. Logits stay as the model gave them; a row's ``SCALE`` is log2(e) / temperature.

What is said of ids is a tile [runs, 8]: a thread has whole runs, so that what is done within one moves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.scoring.rows import ScoringColumn
from outrider.randomness.streams import GROUP_SIZE, KEY_STEPS, LARGEST_UNIT, MULTIPLIERS, ROUNDS, UNIT

RUN_SIZE = 8
"""Neighbouring ids that one thread loads at once, of 16 bits each."""
GROUP = tl.constexpr(GROUP_SIZE)
RUN = tl.constexpr(RUN_SIZE)
GROUP_BITS = tl.constexpr(GROUP_SIZE.bit_length() - 1)
RUN_BITS = tl.constexpr(RUN_SIZE.bit_length() - 1)
"""Shifts, where a division would first look at the sign."""
RUNS_PER_GROUP = tl.constexpr(GROUP_SIZE // RUN_SIZE)
NUM_COLUMNS = tl.constexpr(len(ScoringColumn))
NOTHING = tl.constexpr(2**31 - 1)
"""Value above every id."""
UNWANTED = tl.constexpr(-1e30)
"""Value of a logit that is not to be drawn; finite, so that it does not pass for one that is not finite."""
_FLOOR = tl.constexpr(-1e29)
"""Bound above ``UNWANTED``, so that it weighs nothing even beside itself: the rounding of so large a product is no
weight.
"""

_INDEX = tl.constexpr(int(ScoringColumn.INDEX))
_LIMIT = tl.constexpr(int(ScoringColumn.LIMIT))
_START = tl.constexpr(int(ScoringColumn.SUPPORT_START))
_STOP = tl.constexpr(int(ScoringColumn.SUPPORT_STOP))
_KEY_LOW = tl.constexpr(int(ScoringColumn.KEY_LOW))
_KEY_HIGH = tl.constexpr(int(ScoringColumn.KEY_HIGH))
_POSITION = tl.constexpr(int(ScoringColumn.POSITION))
_BASE = tl.constexpr(int(ScoringColumn.BASE))
_SCALE = tl.constexpr(int(ScoringColumn.SCALE))
_UNIT = tl.constexpr(UNIT)
_LARGEST_UNIT = tl.constexpr(LARGEST_UNIT)
_ROUNDS = tl.constexpr(ROUNDS)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_FIRST_STEP, _SECOND_STEP = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def word(rows_ptr, column: tl.constexpr, row):
    """One word of a row's description."""
    return tl.load(rows_ptr + row * NUM_COLUMNS + column)


@triton.jit
def scale_of(rows_ptr, row):
    """Bits a unit of logit."""
    return word(rows_ptr, _SCALE, row).to(tl.float32, bitcast=True)


@triton.jit
def base_of(rows_ptr, row):
    """The row's base, which keys every stream but the coupled one."""
    return word(rows_ptr, _BASE, row)


@triton.jit
def row_start(logits_ptr, stride, rows_ptr, row):
    """Address of a row's first logit."""
    return logits_ptr + word(rows_ptr, _INDEX, row).to(tl.int64) * stride


@triton.jit
def limit_of(rows_ptr, row):
    """Ids from here on are never drawn."""
    return word(rows_ptr, _LIMIT, row)


@triton.jit
def support_start(rows_ptr, row):
    """Start of the row's support among all."""
    return word(rows_ptr, _START, row)


@triton.jit
def support_stop(rows_ptr, row):
    """End of the row's support among all."""
    return word(rows_ptr, _STOP, row)


@triton.jit
def group_runs(group):
    """The runs of a group."""
    return tl.arange(0, RUNS_PER_GROUP) + group * RUNS_PER_GROUP


@triton.jit
def run_ids(runs):  # [N]
    """The ids of runs, [N, 8]."""
    return runs[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def group_logits(start_ptr, num_tokens, group):
    """The logits of a group as the model gave them, [128, 8]; anything past the vocabulary."""
    ids = run_ids(group_runs(group))
    return tl.load(start_ptr + ids, mask=ids < num_tokens, other=0.0)


@triton.jit
def wanted(logits, limit, group):
    """A group's logits, float32; ``UNWANTED`` past the row's limit. Not the mask of the load: nobody knows a limit's
    alignment, and loads would be of single numbers.
    """
    raw = logits.to(tl.float32)
    if (group + 1) * GROUP > limit:
        raw = tl.where(run_ids(group_runs(group)) < limit, raw, UNWANTED)
    return raw


@triton.jit
def uncut(raw, least, last, ids):
    """Logits, ``UNWANTED`` where they are under the least that stays or equal to it with an id after the last."""
    return tl.where((raw > least) | ((raw == least) & (ids <= last)), raw, UNWANTED)


@triton.jit
def bounded(value):
    """The largest of some logits; where all are ``UNWANTED`` or -inf, what makes nothing of them."""
    return tl.maximum(value, _FLOOR)


@triton.jit
def log2_of(value, FAST: tl.constexpr):
    """Base-2 logarithm of a positive number."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(value)


@triton.jit
def noise_bound(bits, FAST: tl.constexpr):
    """Upper bound of ``noise`` of the bits less 32, and close to it where winners sit: -log1p(-u) is at least u, and u
    at least a part of it; infinite once in 2**32.
    """
    return -log2_of(bits.to(tl.float32), FAST)


@triton.jit
def noise(bits, FAST: tl.constexpr):
    """The contract's Gumbel noise, in bits: -log2(-ln(1 - u)), the inner logarithm by its series where winners sit."""
    unit = tl.minimum((bits.to(tl.float32) + 0.5) * _UNIT, _LARGEST_UNIT)
    tail = 1.0 / 3.0 + unit * (0.25 + unit * (0.2 + unit * (1.0 / 6.0)))
    series = unit + unit * unit * (0.5 + unit * tail)
    plain = log2_of(1.0 - unit, FAST) * -_LN_2
    return -log2_of(tl.where(unit < 0.0625, series, plain), FAST)


@triton.jit
def _philox(key0, key1, c0, c1, c2, c3):
    """Philox4x32-10 by products of 64 bits, of which a GPU makes one where high and low halves would be two.

    A loop that LLVM unrolls: unrolled any sooner it is most of what Triton's own passes look through.
    """
    for _ in range(_ROUNDS):
        product0 = c0.to(tl.uint64) * _FIRST_MULTIPLIER
        product1 = c2.to(tl.uint64) * _SECOND_MULTIPLIER
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 = (key0 + _FIRST_STEP).to(tl.uint32)
        key1 = (key1 + _SECOND_STEP).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def keys_of(rows_ptr, row):
    """Key of a row's noise: both halves of its seed and its position."""
    low, high = word(rows_ptr, _KEY_LOW, row), word(rows_ptr, _KEY_HIGH, row)
    return low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True), word(rows_ptr, _POSITION, row)


@triton.jit
def _lanes(keys, blocks, base, stream: tl.constexpr):
    """The bits of the four neighbouring tokens of each block (token >> 2)."""
    blocks = blocks.to(tl.uint32)
    position = blocks * 0 + keys[2].to(tl.uint32)
    return _philox(keys[0], keys[1], blocks, position, (blocks * 0 + base).to(tl.uint32), blocks * 0 + stream)


@triton.jit
def bits_of(keys, runs, base, stream: tl.constexpr):
    """The bits of the tokens of runs [N], [N, 8]."""
    a0, a1, a2, a3 = _lanes(keys, runs * 2, base, stream)
    b0, b1, b2, b3 = _lanes(keys, runs * 2 + 1, base, stream)
    # A token's place in its run, bit by bit from the highest: which block, then which lane of it.
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(even, odd), [runs.shape[0], RUN])


@triton.jit
def token_bits(keys, ids, base, stream: tl.constexpr):
    """The bits of single tokens."""
    lane0, lane1, lane2, lane3 = _lanes(keys, ids >> 2, base, stream)
    return tl.where((ids & 2) == 0, tl.where((ids & 1) == 0, lane0, lane1), tl.where((ids & 1) == 0, lane2, lane3))


@triton.jit
def lowest_at(values, best, ids):
    """The lowest id whose value is the best."""
    return tl.min(tl.where(values == best, ids, NOTHING))


@triton.jit
def support_ids(rows_ptr, num_rows, start, stop, IDS: tl.constexpr):
    """Ids from place ``start`` of all supports on; ``NOTHING`` from ``stop``, a support's end, on."""
    places = start + tl.arange(0, IDS)
    return tl.load(rows_ptr + NUM_COLUMNS * num_rows + places, mask=places < stop, other=NOTHING)


@triton.jit
def marked(marks, ids, group):
    """A group's marks, a byte in 32 bits for each run and a bit for each id, with those of the given ids added.

    One id after the other: a group has few of a support. Registers can be told apart, but not indexed.
    """
    runs = group_runs(group)
    ids = tl.where(ids >> GROUP_BITS == group, ids, NOTHING)
    lowest = tl.min(ids, 0)
    while lowest != NOTHING:
        marks |= tl.where(runs == lowest >> RUN_BITS, tl.full([], 1, tl.int32) << (lowest & (RUN - 1)), 0)
        ids = tl.where(ids == lowest, NOTHING, ids)
        lowest = tl.min(ids, 0)
    return marks


@triton.jit
def group_marks(rows_ptr, num_rows, start, stop, first_ids, group, IDS: tl.constexpr):
    """A group's marks by the support from ``start`` to ``stop``, of which ``first_ids`` [IDS] are the first."""
    marks = marked(tl.zeros([RUNS_PER_GROUP], tl.int32), first_ids, group)
    for further in range(start + IDS, stop, IDS):
        marks = marked(marks, support_ids(rows_ptr, num_rows, further, stop, IDS), group)
    return marks


@triton.jit
def outside_only(values, marks, nothing):  # [128, 8], [128] int32
    """The values of a group with those in the support at ``nothing``."""
    bits = (marks[:, None] >> tl.arange(0, RUN)[None, :]) & 1
    return tl.where(bits != 0, nothing, values)
