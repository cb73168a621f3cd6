# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Rows that min-p, top-k and top-p cut: one kernel, one program a row, finds the least logit that stays and answers.

No row is sorted. The group kernel has left the largest logit of each run of 8 neighbours. A level is sought that about
a thousand of these reach: whatever reaches it is in one of their runs. Only those are read again, and the logits from
the level up are gathered in the order of their ids; the exact place of the cut is searched for among them, by the bits
of the logits, and all that can be drawn is at hand. That they are enough is checked, not assumed: where they are not
(a distribution so flat that top-p wants more), the row is marked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.scoring.device_functions import (
    GROUP,
    NOTHING,
    RUN,
    RUNS_PER_GROUP,
    UNWANTED,
    base_of,
    bounded,
    group_logits,
    group_marks,
    group_runs,
    keys_of,
    limit_of,
    lowest_at,
    noise,
    outside_only,
    row_start,
    run_ids,
    scale_of,
    support_ids,
    support_start,
    support_stop,
    token_bits,
    uncut,
    wanted,
    word,
)
from outrider.kernels.scoring.drawing import (
    drawn_group,
    drawn_token,
    group_gumbel,
    store_probs,
    support_logits,
    token_gumbel,
)
from outrider.kernels.scoring.partials import FIELDS, load_partials, shrinks
from outrider.kernels.scoring.rows import Found, RowFlags, ScoringColumn
from outrider.randomness.streams import Stream

_FLAGS = tl.constexpr(int(ScoringColumn.FLAGS))
_MIN_P = tl.constexpr(int(ScoringColumn.MIN_P))
_TOP_K = tl.constexpr(int(ScoringColumn.TOP_K))
_TOP_P_LOW = tl.constexpr(int(ScoringColumn.TOP_P_LOW))
_TOP_P_HIGH = tl.constexpr(int(ScoringColumn.TOP_P_HIGH))
_COUPLED = tl.constexpr(int(RowFlags.COUPLED))
_DRAWS = tl.constexpr(int(RowFlags.DRAWS))
_EXCLUDES = tl.constexpr(int(RowFlags.EXCLUDES))
_ENTROPY = tl.constexpr(int(RowFlags.ENTROPY))
_CUTS = tl.constexpr(int(RowFlags.CUTS))
_FOUND_STATUS = tl.constexpr(int(Found.STATUS))
_FOUND_LARGEST = tl.constexpr(int(Found.LARGEST))
_FOUND_ARGMAX = tl.constexpr(int(Found.ARGMAX))
_FOUND_GUMBEL_ARGMAX = tl.constexpr(int(Found.GUMBEL_ARGMAX))
_FOUND_MASS = tl.constexpr(int(Found.MASS))
_FOUND_OUTSIDE = tl.constexpr(int(Found.OUTSIDE))
_FOUND_ENTROPY = tl.constexpr(int(Found.ENTROPY))
_STREAM_COUPLED = tl.constexpr(int(Stream.COUPLED))
_ENTROPY_OFFSET = tl.constexpr(1e-5)
_TINIEST = tl.constexpr(1.2e-38)
_CLEARED = tl.constexpr(2048)
_STEPS = tl.constexpr(32)
"""Bisection steps over the range of logits."""


@triton.jit
def _rank(value, BITS: tl.constexpr):
    """A number in the order of the floats; ``BITS`` of them differ: 16 where the floats were bfloat16."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return (rank >> (32 - BITS)).to(tl.int64)


@triton.jit
def _value(rank, BITS: tl.constexpr):
    """The float of a rank."""
    wide = ((rank << (32 - BITS)) | tl.where(rank < 2 ** (BITS - 1), 2 ** (32 - BITS) - 1, 0)).to(tl.uint32)
    bits = tl.where(wide >= 0x80000000, wide ^ 0x80000000, wide ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _highest_with(values, amounts, needed, low, high, BITS: tl.constexpr):
    """The highest rank from ``low`` to ``high`` such that amounts of it and all above reach ``needed``; or ``low``."""
    while low < high:
        middle = low + (high - low + 1) // 2
        reaches = tl.sum(tl.where(values >= _value(middle, BITS), amounts, 0.0)) >= needed
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle - 1)
    return low


@triton.jit
def _level(values, fewest, most, largest):
    """Threshold at which between ``fewest`` and ``most`` of the values are; -inf where no more than ``most`` are wanted
    at all. Where equals do not allow it, fewer.
    """
    level = largest * 0.0 + float("-inf")
    if tl.sum((values > UNWANTED).to(tl.int32)) > most:
        low = tl.min(tl.where(values > UNWANTED, values, float("inf")))
        high = largest
        step = 0
        while step < _STEPS:
            level = low + (high - low) * 0.5
            count = tl.sum((values >= level).to(tl.int32))
            low = tl.where(count > most, level, low)
            high = tl.where(count < fewest, level, high)
            step = tl.where((count < fewest) | (count > most), step + 1, _STEPS + 1)
        level = tl.where(step > _STEPS, level, high)
    return level


@triton.jit
def _top_p(rows_ptr, row):
    """The row's top-p, float64."""
    low = word(rows_ptr, _TOP_P_LOW, row).to(tl.uint32, bitcast=True).to(tl.int64)
    high = word(rows_ptr, _TOP_P_HIGH, row).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def _cut(raw, weights, ids, level, largest, total, rows_ptr, row, BITS: tl.constexpr):
    """The least logit that stays, the last id of its equals, and whether nothing that was not gathered can stay.

    ``raw``: the gathered logits in the order of their ids, -inf for none. ``total``: what all ids weigh.
    """
    scale = scale_of(rows_ptr, row)
    lowest, highest = _rank(level, BITS), _rank(largest, BITS)
    last = tl.full([], NOTHING, tl.int32)

    min_p = word(rows_ptr, _MIN_P, row).to(tl.float32, bitcast=True)
    # The difference first: of the likeliest it is 0, and its share 1.
    raw = tl.where(tl.exp2((raw - bounded(largest)) * scale) >= min_p, raw, float("-inf"))
    is_whole = (level == float("-inf")) | (tl.exp2((bounded(level) - bounded(largest)) * scale) < min_p)

    top_k = word(rows_ptr, _TOP_K, row)
    if (top_k > 0) & (tl.sum((raw > float("-inf")).to(tl.int32), 0) >= top_k):
        least = _value(_highest_with(raw, 1.0, top_k.to(tl.float32), lowest, highest, BITS), BITS)
        raw = tl.where(raw >= least, raw, float("-inf"))
        is_whole |= top_k > 0

    top_p = _top_p(rows_ptr, row)
    if (top_p < 1.0) & (is_whole | ((min_p == 0.0) & (top_k == 0))):
        kept = tl.where(raw > float("-inf"), weights, 0.0)
        gathered = tl.sum(kept, 0)
        mass = gathered
        if not is_whole:
            mass = total
        needed = mass.to(tl.float64) * top_p
        if gathered.to(tl.float64) >= needed:
            least = _value(_highest_with(raw, kept, needed, lowest, highest, BITS), BITS)
            equals = (raw == least).to(tl.int32)
            each = tl.maximum(tl.max(tl.where(raw == least, kept, 0.0), 0), _TINIEST).to(tl.float64)
            above = tl.sum(tl.where(raw > least, kept, 0.0), 0).to(tl.float64)
            num_wanted = tl.maximum(tl.ceil((needed - above) / each), 1.0)
            if num_wanted < tl.sum(equals, 0).to(tl.float64):
                stays = (equals != 0) & (tl.cumsum(equals, 0) <= num_wanted.to(tl.int32))
                last = tl.max(tl.where(stays, ids, -1), 0)
            raw = tl.where(raw >= least, raw, float("-inf"))
            is_whole |= top_p < 1.0
    least = tl.min(tl.where(raw > float("-inf"), raw, float("inf")), 0)
    return least, last, is_whole


@triton.jit
def _mark_support(own_marks_ptr, rows_ptr, row, num_rows, num_marks, IDS: tl.constexpr):
    """A bit for each id of the row's support, in words of 32."""
    for start in range(0, num_marks, _CLEARED):
        places = start + tl.arange(0, _CLEARED)
        tl.store(own_marks_ptr + places, tl.zeros([_CLEARED], tl.int32), mask=places < num_marks)
    tl.debug_barrier()
    for start in range(support_start(rows_ptr, row), support_stop(rows_ptr, row), IDS):
        ids = support_ids(rows_ptr, num_rows, start, support_stop(rows_ptr, row), IDS)
        bits = tl.full([IDS], 1, tl.int32) << (ids & 31)
        tl.atomic_or(own_marks_ptr + (ids >> 5), bits, mask=ids != NOTHING, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _scatter(pointers, words, mask, FAST: tl.constexpr):
    """Store int32 words where they are: Triton's own store would first hand addresses from thread to thread."""
    if FAST:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }", "=r,l,r,r",
            [pointers.to(tl.int64), words, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointers, words, mask=mask)


@triton.jit
def _run_tops(tops_ptr, row, num_groups, limit, TOPS: tl.constexpr):
    """The largest logit of each run, -inf past the row's limit."""
    runs = tl.arange(0, TOPS)
    own_tops_ptr = tops_ptr + row.to(tl.int64) * num_groups * RUNS_PER_GROUP
    tops = tl.load(own_tops_ptr + runs, mask=runs < num_groups * RUNS_PER_GROUP, other=float("-inf"))
    return tl.where(runs < (limit + RUN - 1) // RUN, tops.to(tl.float32), float("-inf"))


@triton.jit
def _gathered(start_ptr, num_tokens, limit, tops, top_k, largest, chosen_ptr, TOPS: tl.constexpr,
              RUNS: tl.constexpr, GATHERED: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """The level from which on logits are gathered, and how many: left at ``chosen_ptr``, in the order of their ids."""
    fewest = tl.where((top_k > 0) & (top_k <= RUNS), top_k, RUNS // 4 * 3)
    level = _level(tops, fewest, RUNS, largest)
    is_chosen = ((tops >= level) & (tops > UNWANTED)).to(tl.int32)
    slots = tl.cumsum(is_chosen, 0) - 1
    num_chosen = tl.sum(is_chosen, 0)
    if num_chosen <= RUNS:
        _scatter(chosen_ptr + slots, tl.arange(0, TOPS), is_chosen != 0, FAST)
    tl.debug_barrier()

    slots = tl.arange(0, RUNS)
    ids = run_ids(tl.where(slots < num_chosen, tl.load(chosen_ptr + slots), NOTHING // RUN))
    raw = tl.load(start_ptr + ids, mask=ids < num_tokens, other=float("-inf")).to(tl.float32)
    raw = tl.where(ids < limit, raw, float("-inf"))
    level = tl.maximum(level, _level(tl.where(raw >= level, raw, float("-inf")), fewest, GATHERED, largest))
    is_chosen = ((raw >= level) & (raw > UNWANTED)).to(tl.int32)
    of_run = tl.sum(is_chosen, 1)
    slots = (tl.cumsum(of_run, 0) - of_run)[:, None] + tl.cumsum(is_chosen, 1) - 1
    count = tl.sum(of_run, 0)
    tl.debug_barrier()
    if count <= GATHERED:
        _scatter(chosen_ptr + slots, ids, is_chosen != 0, FAST)
        _scatter(chosen_ptr + GATHERED + slots, raw.to(tl.int32, bitcast=True), is_chosen != 0, FAST)
    tl.debug_barrier()
    # Where there is no room for all, for none.
    return level, tl.where((num_chosen > RUNS) | (count > GATHERED), 0, count)


@triton.jit
def _joined(left_group, left_sum, right_group, right_sum):
    """Sums that begin anew with each group."""
    return right_group, tl.where(left_group == right_group, left_sum + right_sum, right_sum)


@triton.jit
def _group_masses(own_ids_ptr, own_masses_ptr, ids, weights, count, GROUPS: tl.constexpr, GATHERED: tl.constexpr,
                  FAST: tl.constexpr):  # fmt: skip
    """The mass of each group, [GROUPS], from weights in the order of their ids."""
    groups, slots = tl.arange(0, GROUPS), tl.arange(0, GATHERED)
    tl.store(own_masses_ptr + groups, tl.zeros([GROUPS], tl.int32))
    group = ids // GROUP
    _, masses = tl.associative_scan((group, weights), 0, _joined)
    following = tl.where(slots + 1 < count, tl.load(own_ids_ptr + slots + 1), NOTHING) // GROUP
    tl.debug_barrier()
    ends = (slots < count) & (following != group)
    _scatter(own_masses_ptr + group, masses.to(tl.int32, bitcast=True), ends, FAST)
    tl.debug_barrier()
    return tl.load(own_masses_ptr + groups).to(tl.float32, bitcast=True)


@triton.jit
def _find_tokens(raw, weights, total, largest, ids, rows_ptr, own, row, num_rows, FAST: tl.constexpr):
    """Results that need no draw: the likeliest token, the coupled Gumbel argmax, the entropy."""
    flags = word(rows_ptr, _FLAGS, row)
    if (flags & (_COUPLED | _DRAWS)) == 0:
        tl.store(own + _FOUND_ARGMAX * num_rows, lowest_at(raw, largest, ids))
    if (flags & _ENTROPY) != 0:
        probs = weights / total
        entropy = -tl.sum(probs * tl.log(probs + _ENTROPY_OFFSET), 0)
        tl.store(own + _FOUND_ENTROPY * num_rows, entropy.to(tl.int32, bitcast=True))
    if (flags & _COUPLED) != 0:
        bits = token_bits(keys_of(rows_ptr, row), ids, 0, _STREAM_COUPLED)
        scores = raw * scale_of(rows_ptr, row) + noise(bits, FAST)
        scores = tl.where(raw > UNWANTED, scores, float("-inf"))
        tl.store(own + _FOUND_GUMBEL_ARGMAX * num_rows, lowest_at(scores, tl.max(scores, 0), ids))


@triton.jit
def _drawn(start_ptr, num_tokens, limit, rows_ptr, masses, least, last, row, num_rows, excludes, GROUPS: tl.constexpr,
           IDS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """A token by the masses of what stays, [GROUPS]."""
    keys, base = keys_of(rows_ptr, row), base_of(rows_ptr, row)
    group = drawn_group(masses, group_gumbel(keys, base, GROUPS, FAST), FAST)
    raw = wanted(group_logits(start_ptr, num_tokens, group), limit, group)
    raw = uncut(raw, least, last, run_ids(group_runs(group)))
    scores = raw * scale_of(rows_ptr, row) + token_gumbel(keys, base, group, FAST)
    if excludes:
        start, stop = support_start(rows_ptr, row), support_stop(rows_ptr, row)
        first_ids = support_ids(rows_ptr, num_rows, start, stop, IDS)
        marks = group_marks(rows_ptr, num_rows, start, stop, first_ids, group, IDS)
        scores = outside_only(scores, marks, float("-inf"))
    return drawn_token(scores, group)


@triton.jit(do_not_specialize=["num_rows"])
def _cut_kernel(
    logits_ptr,  # [N, V]
    rows_ptr,  # [14 R + M] int32
    marks_ptr,  # [R, W] int32
    groups_ptr,  # [R, G, 4] float32
    tops_ptr,  # [R, 128 G]
    chosen_ptr,  # [R, 2 GATHERED] int32, first of runs, then of ids and logits
    group_masses_ptr,  # [R, GROUPS] int32, the bits of float32
    found_ptr,  # [7 R + M] int32
    stride,
    num_rows,
    num_tokens,
    num_groups,
    num_marks,
    TOPS: tl.constexpr,
    RUNS: tl.constexpr,
    GATHERED: tl.constexpr,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    BITS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    flags = word(rows_ptr, _FLAGS, row)
    excludes = (flags & (_EXCLUDES | _CUTS)) == (_EXCLUDES | _CUTS)
    own_marks_ptr = marks_ptr + row.to(tl.int64) * num_marks
    if excludes:
        _mark_support(own_marks_ptr, rows_ptr, row, num_rows, num_marks, IDS)
    if PDL:
        gdc_wait()
    if (flags & _CUTS) == 0:
        return
    scale = scale_of(rows_ptr, row)
    start_ptr, limit = row_start(logits_ptr, stride, rows_ptr, row), limit_of(rows_ptr, row)
    own = found_ptr + row
    own_ids_ptr = chosen_ptr + row.to(tl.int64) * 2 * GATHERED

    tops = _run_tops(tops_ptr, row, num_groups, limit, TOPS)
    largest = tl.max(tops, 0)
    level, count = _gathered(start_ptr, num_tokens, limit, tops, word(rows_ptr, _TOP_K, row),
                             largest, own_ids_ptr, TOPS, RUNS, GATHERED, FAST)  # fmt: skip

    slots = tl.arange(0, GATHERED)
    ids = tl.where(slots < count, tl.load(own_ids_ptr + slots), NOTHING)
    raw = tl.load(own_ids_ptr + GATHERED + slots).to(tl.float32, bitcast=True)
    raw = tl.where(slots < count, raw, float("-inf"))
    weights = tl.exp2(raw * scale - bounded(largest) * scale)
    group_tops, totals, _, _, not_finite = load_partials(groups_ptr + row * num_groups * FIELDS, num_groups, GROUPS)
    total = tl.sum(totals * shrinks(group_tops, largest, scale), 0)
    least, last, is_whole = _cut(raw, weights, ids, level, largest, total, rows_ptr, row, BITS)
    raw = uncut(raw, least, last, ids)
    weights = tl.where(raw > UNWANTED, weights, 0.0)
    total = tl.sum(weights, 0)

    is_short = ((is_whole == 0) | (count == 0)).to(tl.int32)
    tl.store(own + _FOUND_STATUS * num_rows, tl.max(not_finite, 0) + 2 * is_short)
    tl.store(own + _FOUND_LARGEST * num_rows, largest.to(tl.int32, bitcast=True))
    _find_tokens(raw, weights, total, largest, ids, rows_ptr, own, row, num_rows, FAST)
    if (flags & _DRAWS) != 0:
        outside = weights
        if excludes:
            marks = tl.load(own_marks_ptr + (ids >> 5), mask=slots < count, other=0, cache_modifier=".cg")
            outside = tl.where(((marks >> (ids & 31)) & 1) != 0, 0.0, weights)
        token = row * 0 - 1
        if tl.sum(outside, 0) > 0.0:
            own_masses_ptr = group_masses_ptr + row.to(tl.int64) * GROUPS
            masses = _group_masses(own_ids_ptr, own_masses_ptr, ids, outside, count, GROUPS, GATHERED, FAST)
            token = _drawn(start_ptr, num_tokens, limit, rows_ptr, masses, least, last, row, num_rows, excludes,
                           GROUPS, IDS, FAST)  # fmt: skip
        tl.store(own + _FOUND_MASS * num_rows, (tl.sum(outside, 0) / total).to(tl.int32, bitcast=True))
        tl.store(own + _FOUND_OUTSIDE * num_rows, token)
    for start in range(support_start(rows_ptr, row), support_stop(rows_ptr, row), IDS):
        given, inside = support_logits(start_ptr, rows_ptr, num_rows, start, support_stop(rows_ptr, row), IDS)
        inside = uncut(inside, least, last, given)
        store_probs(found_ptr, scale, num_rows, start, given, inside, largest, total, IDS)
