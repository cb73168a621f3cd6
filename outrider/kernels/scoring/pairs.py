# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Groups of bfloat16 logits as words of two: loads, extremes and float32 numbers for half the instructions.

Owns what is done before logits are float32. A word's lower half is the logit of the lower id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.scoring.device_functions import GROUP, RUN, RUNS_PER_GROUP, group_runs

_WORDS = tl.constexpr(RUN.value // 2)
"""Words of a run."""
_UNWANTED = tl.constexpr(0xF14AF14A - 2**32)
"""Twice the bfloat16 next to ``UNWANTED``, below it."""
_UPPER = tl.constexpr(-65536)
"""The upper half of a word."""
_LANES = tl.constexpr(32)
_ORDER = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _places():
    """The words of a group, [128, 4]."""
    return tl.arange(0, RUNS_PER_GROUP)[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]


@triton.jit
def group_pairs(start_ptr, num_tokens, group):
    """The logits of a group as the model gave them, [128, 4] int32; 0 past the vocabulary."""
    words_ptr = (start_ptr + group * GROUP).to(tl.pointer_type(tl.int32)) + _places()
    if (group + 1) * GROUP <= num_tokens:
        words = tl.load(words_ptr)
    else:
        words = tl.load(words_ptr, mask=group * (GROUP // 2) + _places() < num_tokens // 2, other=0)
    return words


@triton.jit
def wanted_pairs(words, limit, group):
    """The same with ``UNWANTED`` past the row's limit."""
    if (group + 1) * GROUP > limit:
        # What is left of each run: one number, where ids would be as many as logits.
        left = (limit - group_runs(group) * RUN)[:, None]
        places = 2 * tl.arange(0, _WORDS)[None, :]
        lower = tl.where(places < left, words, _UNWANTED) & 0xFFFF
        words = (tl.where(places + 1 < left, words, _UNWANTED) & _UPPER) | lower
    return words


@triton.jit
def lower_halves(words):
    """The logits of the even ids, float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper_halves(words):
    """The logits of the odd ids, float32."""
    return (words & _UPPER).to(tl.float32, bitcast=True)


@triton.jit
def numbers(words):  # [N, 4]
    """All logits, [N, 8] float32."""
    return tl.reshape(tl.join(lower_halves(words), upper_halves(words)), [words.shape[0], RUN])


@triton.jit
def _word(lower, upper):
    """The word of two float32 that are bfloat16."""
    lower = (lower.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return lower | (upper.to(tl.int32, bitcast=True) & _UPPER)


@triton.jit
def _larger(a, b, FAST: tl.constexpr):
    """Half by half the larger; NaN where one is NaN."""
    if FAST:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    lower = tl.maximum(lower_halves(a), lower_halves(b), propagate_nan=tl.PropagateNan.ALL)
    upper = tl.maximum(upper_halves(a), upper_halves(b), propagate_nan=tl.PropagateNan.ALL)
    return _word(lower, upper)


@triton.jit
def _smaller(a, b, FAST: tl.constexpr):
    """Half by half the smaller; NaN where one is NaN."""
    if FAST:
        return tl.inline_asm_elementwise(
            "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    lower = tl.minimum(lower_halves(a), lower_halves(b), propagate_nan=tl.PropagateNan.ALL)
    upper = tl.minimum(upper_halves(a), upper_halves(b), propagate_nan=tl.PropagateNan.ALL)
    return _word(lower, upper)


@triton.jit
def _quarters(words):  # [N, 4]
    """The four columns."""
    evens, odds = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    return first, second, third, fourth


@triton.jit
def _by_thread(words):  # [128]
    """The words that a thread has of a warp's, next to each other, [32, 4]."""
    return tl.trans(tl.reshape(words, [RUNS_PER_GROUP // _LANES, _LANES]))


@triton.jit
def _largest_pairs(words, FAST: tl.constexpr):  # [N, 4]
    """[N]."""
    a, b, c, d = _quarters(words)
    return _larger(_larger(a, b, FAST), _larger(c, d, FAST), FAST)


@triton.jit
def _smallest_pairs(words, FAST: tl.constexpr):  # [N, 4]
    """[N]."""
    a, b, c, d = _quarters(words)
    return _smaller(_smaller(a, b, FAST), _smaller(c, d, FAST), FAST)


@triton.jit
def _key(bits):
    """Bits of float32 in the order of the floats, NaN above all; its own inverse."""
    return bits ^ ((bits >> 31) & _ORDER)


@triton.jit
def extremes(words, FAST: tl.constexpr):
    """The largest logit of each run, the upper half of words [128]; the group's; whether one is not finite."""
    tops = _largest_pairs(words, FAST)
    largest = _largest_pairs(_by_thread(tops), FAST)
    lowest = _smallest_pairs(_by_thread(_smallest_pairs(words, FAST)), FAST)
    largest = tl.max(_key(_larger(largest, largest << 16, FAST) & _UPPER), 0)
    lowest = tl.min(_key(_smaller(lowest, lowest << 16, FAST) & _UPPER), 0)
    is_not_finite = (largest >= _INFINITY) | (lowest <= _key(_INFINITY - 2**31))
    return _larger(tops, tops << 16, FAST), _key(largest).to(tl.float32, bitcast=True), is_not_finite
