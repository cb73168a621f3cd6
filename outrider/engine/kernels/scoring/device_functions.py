# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""What the scoring kernels share: a row's words, its logits, exponentials and noise.

Everything is in bits, not nats: a GPU has one instruction for a base-2 logarithm and one for a power of two, each right
to two units in the last place. Logits stay as the model gave them; a row's ``SCALE`` is log2(e) / temperature.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.scoring.rows import Column
from outrider.randomness.streams import GROUP_SIZE, KEY_STEPS, LARGEST_UNIT, MULTIPLIERS, ROUNDS, UNIT

GROUP = tl.constexpr(GROUP_SIZE)
NUM_COLUMNS = tl.constexpr(len(Column))
NOTHING = tl.constexpr(2**31 - 1)
"""Above every id."""
UNWANTED = tl.constexpr(-1e30)
"""In the place of a logit that is not to be drawn; finite, so that it does not pass for one that is unfit."""
_FLOOR = tl.constexpr(-1e29)
"""Above ``UNWANTED``, so that it weighs nothing even beside itself: the rounding of so large a product is no weight."""

# What is said of where a row is cut: [3, R] int32
LEAST = tl.constexpr(0)
"""Float32: the least logit that stays."""
LAST = tl.constexpr(1)
"""Of logits equal to it, ids up to this one stay."""
SHORT = tl.constexpr(2)
"""1 where too few were gathered to tell."""

_INDEX = tl.constexpr(int(Column.INDEX))
_LIMIT = tl.constexpr(int(Column.LIMIT))
_KEY_LOW = tl.constexpr(int(Column.KEY_LOW))
_KEY_HIGH = tl.constexpr(int(Column.KEY_HIGH))
_POSITION = tl.constexpr(int(Column.POSITION))
_BASE = tl.constexpr(int(Column.BASE))
_SCALE = tl.constexpr(int(Column.SCALE))
_UNIT = tl.constexpr(UNIT)
_LARGEST_UNIT = tl.constexpr(LARGEST_UNIT)
_ROUNDS = tl.constexpr(ROUNDS)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_FIRST_STEP, _SECOND_STEP = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def word(rows_ptr, column: tl.constexpr, row, num_rows):
    """One word of a row's description."""
    return tl.load(rows_ptr + column * num_rows + row)


@triton.jit
def scale_of(rows_ptr, row, num_rows):
    """Bits a unit of logit."""
    return word(rows_ptr, _SCALE, row, num_rows).to(tl.float32, bitcast=True)


@triton.jit
def base_of(rows_ptr, row, num_rows):
    """The row's base, which keys every stream but the coupled one."""
    return word(rows_ptr, _BASE, row, num_rows)


@triton.jit
def row_start(logits_ptr, stride, rows_ptr, row, num_rows):
    """Where a row's logits begin."""
    return logits_ptr + word(rows_ptr, _INDEX, row, num_rows).to(tl.int64) * stride


@triton.jit
def limit_of(rows_ptr, row, num_rows):
    """Ids from here on are never drawn."""
    return word(rows_ptr, _LIMIT, row, num_rows)


@triton.jit
def group_logits(start_ptr, num_tokens, group):
    """The logits of a group as the model gave them; anything past the vocabulary."""
    ids = tl.arange(0, GROUP) + group * GROUP
    return tl.load(start_ptr + ids, mask=ids < num_tokens, other=0.0)


@triton.jit
def wanted(logits, limit, group):
    """A group's logits, float32; ``UNWANTED`` past the row's limit. Not the mask of the load: nobody knows a limit's
    alignment, and loads would be of single numbers.
    """
    raw = logits.to(tl.float32)
    if (group + 1) * GROUP > limit:
        raw = tl.where(tl.arange(0, GROUP) + group * GROUP < limit, raw, UNWANTED)
    return raw


@triton.jit
def uncut(raw, cuts_ptr, row, num_rows, ids, HAS_CUTS: tl.constexpr):
    """Logits of a row, ``UNWANTED`` where its cuts leave nothing of them."""
    if HAS_CUTS:
        least = tl.load(cuts_ptr + LEAST * num_rows + row).to(tl.float32, bitcast=True)
        last = tl.load(cuts_ptr + LAST * num_rows + row)
        raw = tl.where((raw > least) | ((raw == least) & (ids <= last)), raw, UNWANTED)
    return raw


@triton.jit
def group_ids(group):
    """The ids of a group."""
    return tl.arange(0, GROUP) + group * GROUP


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
    """At least ``noise`` of the bits less 32, and close to it where winners sit: -log1p(-u) is at least u."""
    return -log2_of(bits.to(tl.float32) + 0.5, FAST)


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
    """Philox4x32-10 by products of 64 bits, of which a GPU makes one where high and low halves would be two."""
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * _FIRST_MULTIPLIER
        product1 = c2.to(tl.uint64) * _SECOND_MULTIPLIER
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 = (key0 + _FIRST_STEP).to(tl.uint32)
        key1 = (key1 + _SECOND_STEP).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def bits_of(rows_ptr, row, num_rows, blocks, base, stream):
    """The bits of four neighbouring tokens for each block (token >> 2), in the tokens' order."""
    key_low = word(rows_ptr, _KEY_LOW, row, num_rows).to(tl.uint32, bitcast=True)
    key_high = word(rows_ptr, _KEY_HIGH, row, num_rows).to(tl.uint32, bitcast=True)
    position = word(rows_ptr, _POSITION, row, num_rows)
    zero = blocks.to(tl.uint32) * 0
    lane0, lane1, lane2, lane3 = _philox(
        key_low, key_high, blocks.to(tl.uint32), zero + position.to(tl.uint32), zero + base.to(tl.uint32),
        zero + stream.to(tl.uint32),
    )  # fmt: skip
    return tl.interleave(tl.interleave(lane0, lane2), tl.interleave(lane1, lane3))


@triton.jit
def group_blocks(group):
    """The blocks of the generator that serve a group."""
    return tl.arange(0, GROUP // 4) + group * (GROUP // 4)


@triton.jit
def lowest_at(values, best, ids):
    """The lowest id whose value is the best."""
    return tl.min(tl.where(values == best, ids, NOTHING), 0)


@triton.jit
def group_marks(own_marks_ptr, group):
    """A byte for each eight ids of a group."""
    return tl.load(own_marks_ptr + group * (GROUP // 8) + tl.arange(0, GROUP // 8))


@triton.jit
def outside_only(weights, marks):
    """The weights of a group with those in the support at 0."""
    bits = (marks.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.where(tl.reshape(bits, [GROUP]) != 0, 0.0, weights)


@triton.jit
def is_marked(marks_ptr, row, num_marks, ids):
    """Whether ids are in the row's support."""
    marks = tl.load(marks_ptr + row.to(tl.int64) * num_marks + (ids >> 5))
    return ((marks >> (ids & 31)) & 1) != 0
