# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``draft_sampling`` as four Triton kernels, each of several programs a row.

``partial`` finds, part by part, the largest logit, the sum of the exponentials, and the largest with its noise.
``histogram`` counts the tokens of sparse and cut rows by the leading bits of their probability. ``gather`` collects
every token that can be drawn: those of the leading bins until they surely hold the mass that is wanted and what
top-k and min-p look at, or until there are ``limit``. ``finish`` finds each candidate's place and the mass before it by
comparing all with all, so that nothing need be sorted; a row's last program cuts and draws.

The candidates of the bins hardly ever pass their number times two; where they do (flat rows, many equals), ``gather``
finds the exact edge by bisection, over bits and then over ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.draft_sampling.layout import NUM_COLUMNS, NUM_FIELDS, DraftSink, DrawColumn, Method
from outrider.kernels.launching import launch_options
from outrider.randomness.philox_triton import gumbel_of_bits, philox_lanes
from outrider.randomness.streams import GROUP_SIZE, LANES, Stream

_METHOD = tl.constexpr(int(DrawColumn.METHOD))
_TEMPERATURE = tl.constexpr(int(DrawColumn.TEMPERATURE))
_SEED_LOW = tl.constexpr(int(DrawColumn.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(DrawColumn.SEED_HIGH))
_STREAM = tl.constexpr(int(DrawColumn.STREAM))
_BASE = tl.constexpr(int(DrawColumn.BASE))
_POSITION = tl.constexpr(int(DrawColumn.POSITION))
_LENGTH = tl.constexpr(int(DrawColumn.LENGTH))
_NUM_IDS = tl.constexpr(int(DrawColumn.NUM_IDS))
_MIN_P = tl.constexpr(int(DrawColumn.MIN_P))
_TOP_K = tl.constexpr(int(DrawColumn.TOP_K))
_TOP_P = tl.constexpr(int(DrawColumn.TOP_P))
_NUM_BANNED = tl.constexpr(int(DrawColumn.NUM_BANNED))
_BANNED = tl.constexpr(int(DrawColumn.BANNED))
_UNTIL = tl.constexpr(int(DrawColumn.UNTIL))
_NONE = tl.constexpr(int(Method.NONE))
_COUPLED = tl.constexpr(int(Method.COUPLED))
_SPARSE = tl.constexpr(int(Method.SPARSE))
_CUT_COUPLED = tl.constexpr(int(Method.CUT_COUPLED))
_GROUPED = tl.constexpr(int(Method.GROUPED))
_STREAM_GROUP = tl.constexpr(int(Stream.OUTSIDE_GROUP))
_COLUMNS = tl.constexpr(int(NUM_COLUMNS))
_FIELDS = tl.constexpr(int(NUM_FIELDS))
_LANES = tl.constexpr(LANES)
_SHIFT = tl.constexpr(19)
_BIN_SIZE = tl.constexpr(1 << 19)
_BINS = tl.constexpr(2048)  # a probability's bits, up to those of 1.0, shifted
_NO_ID = tl.constexpr(2**31 - 1)
_LARGEST, _MASS, _BEST, _FLAW = (tl.constexpr(i) for i in range(4))  # a partial's rows
_NO_MASS = tl.constexpr(4.0)  # that nothing has
_MARGIN = tl.constexpr(1e-5)  # of masses that are sums of float32
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_LOW = tl.constexpr(1.925963033500011e-08)  # what float32 leaves of it

_CHUNK = GROUP_SIZE  # a part is a group of ``GROUPED``
_PLAIN = ["parameters_ptr"]
"""Read number by number from wherever it lies: no kernel of its own for each alignment."""
_MIN_CAPACITY = 256
_PLACED, _COMPARED = 16, 128
"""Candidates that one program finds the places of, and those that it compares them with at once."""
FEW = 256
"""Candidates of nearly all rows that are cut. A program for more is long, and is run once: mostly it waits for its own
instructions."""
_SURE_MASS = 1 - 1e-5
"""Up to this mass the rounding of the sum of all probabilities is far below what is left out."""


@triton.jit
def _is_drawing(numbers):
    return (tl.load(numbers + _METHOD) != _NONE) & (tl.load(numbers + _LENGTH) > 0)


@triton.jit
def _is_gathered(numbers):
    """True if a row draws among candidates."""
    method = tl.load(numbers + _METHOD)
    return ((method == _SPARSE) | (method == _CUT_COUPLED)) & (tl.load(numbers + _LENGTH) > 0)


@triton.jit
def _processed(raw, token, numbers, vocab_size):
    """Logits [any] float32 of ``token`` after temperature, those never drawn at -inf."""
    temperature = tl.load(numbers + _TEMPERATURE).to(tl.float32, bitcast=True)
    position = tl.load(numbers + _POSITION)
    allowed = token < tl.minimum(tl.load(numbers + _NUM_IDS), vocab_size)
    for i in range(tl.load(numbers + _NUM_BANNED)):
        is_banned = (token == tl.load(numbers + _BANNED + i)) & (position < tl.load(numbers + _UNTIL + i))
        allowed = allowed & (is_banned == 0)
    return tl.where(allowed, tl.div_rn(raw, temperature), float("-inf"))


@triton.jit
def _exp(x):
    """exp(x), x at most 0, to two units in the last place; 0 below 2**-126."""
    turns = tl.floor(x * _LOG2_E + 0.5)
    turns = tl.maximum(turns, -200.0)
    rest = tl.fma(x, _LOG2_E, -turns) + x * _LOG2_E_LOW
    return tl.where(turns > -126.0, tl.exp2(rest) * tl.exp2(turns), 0.0)


@triton.jit
def _summary(partials_ptr, row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, sum of exponentials under it, largest with noise, any flaw) of a row."""
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    partial = partials_ptr + row * 4 * PARTS + part
    maxima = tl.load(partial + _LARGEST * PARTS, mask=inside, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(partial + _MASS * PARTS, mask=inside, other=0.0, cache_modifier=".cg")
    bests = tl.load(partial + _BEST * PARTS, mask=inside, other=float("-inf"), cache_modifier=".cg")
    flaws = tl.load(partial + _FLAW * PARTS, mask=inside, other=0.0, cache_modifier=".cg")
    largest = tl.max(maxima, 0)
    base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    mass = tl.sum(tl.where(masses > 0.0, masses * _exp(tl.minimum(maxima - base, 0.0)), 0.0), 0)
    return largest, mass, tl.max(bests, 0), tl.max(flaws, 0) > 0.0


@triton.jit
def _is_usable(largest, flawed):
    return (tl.abs(largest) < float("inf")) & (flawed == 0)


@triton.jit
def _probability_bits(logits, token, numbers, largest, mass, floor, vocab_size):
    """The bits of probabilities [any], monotone; -1 of tokens that no support needs."""
    raw = tl.load(logits + token, mask=token < vocab_size, other=0.0).to(tl.float32)
    x = _processed(raw, token, numbers, vocab_size) - largest
    probability = tl.div_rn(_exp(tl.maximum(x, -150.0)), mass)
    probability = tl.where(x > -150.0, probability, 0.0)
    is_needed = (probability > 0.0) & (probability >= floor)
    return tl.where(is_needed, probability.to(tl.int32, bitcast=True), -1)


@triton.jit
def _noise_of(tokens, numbers, stream):
    """Gumbel noise [N] of any tokens [N]."""
    lanes = philox_lanes(
        tl.load(numbers + _SEED_LOW).to(tl.uint32, bitcast=True),
        tl.load(numbers + _SEED_HIGH).to(tl.uint32, bitcast=True),
        tl.load(numbers + _POSITION), tl.load(numbers + _BASE), stream, tokens >> 2,
    )  # fmt: skip
    lane = tokens & 3
    low = tl.where(lane == 0, lanes[0], lanes[1])
    high = tl.where(lane == 2, lanes[2], lanes[3])
    return gumbel_of_bits(tl.where(lane < 2, low, high))


@triton.jit
def _group_scores(partial, index, numbers, PARTS: tl.constexpr):
    """First stage of a draw by groups: logarithms of the parts' masses with the noise of each."""
    maxima = tl.load(partial + _LARGEST * PARTS, mask=index < PARTS, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(partial + _MASS * PARTS, mask=index < PARTS, other=0.0, cache_modifier=".cg")
    has_mass = masses > 0.0
    scores = (
        tl.log(tl.where(has_mass, masses, 1.0))
        + maxima
        + _noise_of(index, numbers, tl.full([], _STREAM_GROUP, tl.int32))
    )
    return tl.where(has_mass, scores, float("-inf"))


@triton.jit
def _neighbours_noise(blocks, numbers):
    """Gumbel noise [N, 4] of the four tokens of each block [N]."""
    lanes = philox_lanes(
        tl.load(numbers + _SEED_LOW).to(tl.uint32, bitcast=True),
        tl.load(numbers + _SEED_HIGH).to(tl.uint32, bitcast=True),
        tl.load(numbers + _POSITION), tl.load(numbers + _BASE), tl.load(numbers + _STREAM), blocks,
    )  # fmt: skip
    lane = tl.arange(0, _LANES)[None, :]
    low = tl.where(lane == 0, lanes[0][:, None], lanes[1][:, None])
    high = tl.where(lane == 2, lanes[2][:, None], lanes[3][:, None])
    return gumbel_of_bits(tl.where(lane < 2, low, high))


@triton.jit(do_not_specialize_on_alignment=_PLAIN)
def _reduce_kernel(
    logits_ptr,  # [B, V]
    parameters_ptr,  # [B, NUM_COLUMNS]
    partials_ptr,  # [B, 4, PARTS] float32
    best_ids_ptr,  # [B, PARTS] int32
    histogram_ptr,  # [B, BINS] int32
    counters_ptr,  # [B, 2] int32: candidates, programs that finished
    vocab_size,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    numbers = parameters_ptr + row * _COLUMNS
    if _is_drawing(numbers) == 0:
        return
    method = tl.load(numbers + _METHOD)
    gathered = _is_gathered(numbers)
    if (part == 0) & gathered:
        tl.store(histogram_ptr + row * _BINS + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
        tl.store(counters_ptr + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    block = part * (CHUNK // _LANES) + tl.arange(0, CHUNK // _LANES)
    token = block[:, None] * _LANES + tl.arange(0, _LANES)[None, :]
    raw = tl.load(logits_ptr + row * vocab_size + token, mask=token < vocab_size, other=0.0).to(tl.float32)
    flaw = tl.max(tl.max(tl.where(tl.abs(raw) < float("inf"), 0.0, 1.0), 1), 0)
    processed = _processed(raw, token, numbers, vocab_size)
    largest = tl.max(tl.max(processed, 1), 0)
    scores = processed
    if (method == _COUPLED) | (method == _GROUPED):
        scores += _neighbours_noise(block, numbers)
    mass = 0.0
    if gathered | (method == _GROUPED):
        base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        below = tl.minimum(processed - base, 0.0)
        weights = tl.where(below > -150.0, _exp(tl.maximum(below, -150.0)), 0.0)
        mass = tl.sum(tl.sum(weights, 1), 0)
    best = tl.max(tl.max(scores, 1), 0)
    best_id = tl.min(tl.min(tl.where(scores == best, token, _NO_ID), 1), 0)
    partial = partials_ptr + row * 4 * PARTS + part
    tl.store(partial + _LARGEST * PARTS, largest)
    tl.store(partial + _MASS * PARTS, mass)
    tl.store(partial + _BEST * PARTS, best)
    tl.store(partial + _FLAW * PARTS, flaw)
    tl.store(best_ids_ptr + row * PARTS + part, best_id)


@triton.jit(do_not_specialize_on_alignment=_PLAIN)
def _histogram_kernel(
    logits_ptr,  # [B, V]
    parameters_ptr,  # [B, NUM_COLUMNS]
    partials_ptr,  # [B, 4, PARTS] float32
    histogram_ptr,  # [B, BINS] int32
    vocab_size,
    floor,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    numbers = parameters_ptr + row * _COLUMNS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if _is_gathered(numbers) == 0:
        return
    largest, mass, _, flawed = _summary(partials_ptr, row, PARTS, BLOCK_PARTS)
    if _is_usable(largest, flawed) == 0:
        return
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bits = _probability_bits(logits_ptr + row * vocab_size, token, numbers, largest, mass, floor, vocab_size)
    bin_ = tl.maximum(bits, 0) >> _SHIFT
    tl.atomic_add(histogram_ptr + row * _BINS + bin_, 1, mask=bits >= 0, sem="relaxed")


@triton.jit
def _count(logits, numbers, largest, mass, floor, vocab_size, low, cut_id, CHUNK: tl.constexpr):
    """Tokens above ``low``, and those at it with an id under ``cut_id``."""
    found = 0
    for start in range(0, vocab_size, CHUNK):
        token = start + tl.arange(0, CHUNK)
        bits = _probability_bits(logits, token, numbers, largest, mass, floor, vocab_size)
        found += tl.sum(((bits > low) | ((bits == low) & (token < cut_id))).to(tl.int32), 0)
    return found


@triton.jit
def _bisect(logits, numbers, largest, mass, floor, vocab_size, low, LIMIT: tl.constexpr, CHUNK: tl.constexpr):
    """The bits and the id at which exactly ``LIMIT`` tokens are in; ``low`` begins the bin in which that is."""
    high = low + _BIN_SIZE
    while high - low > 1:
        middle = (low + high) // 2
        found = _count(logits, numbers, largest, mass, floor, vocab_size, middle, vocab_size, CHUNK)
        low = tl.where(found >= LIMIT, middle, low)
        high = tl.where(found >= LIMIT, high, middle)
    under = 0
    cut_id = vocab_size
    while cut_id - under > 1:
        middle = (under + cut_id) // 2
        found = _count(logits, numbers, largest, mass, floor, vocab_size, low, middle, CHUNK)
        cut_id = tl.where(found >= LIMIT, middle, cut_id)
        under = tl.where(found >= LIMIT, under, middle)
    return low, cut_id


@triton.jit
def _sufficient_edge(counts, from_here_up, bin_, numbers, mass, uncounted, MASS: tl.constexpr, LIMIT: tl.constexpr):
    """The highest bin from which on there is all that can be drawn, and all that the cuts look at."""
    top_p = tl.load(numbers + _TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(numbers + _MIN_P).to(tl.float32, bitcast=True)
    top_k = tl.load(numbers + _TOP_K)
    # Of the bins below, which hold no more than their upper edges say, all the mass can be spared that is not wanted.
    weights = counts.to(tl.float32) * ((bin_ + 1) << _SHIFT).to(tl.float32, bitcast=True)
    below = tl.cumsum(weights, 0) - weights
    uncut = tl.where(tl.load(numbers + _METHOD) == _SPARSE, MASS, 1.0)
    spare = 1.0 - tl.where(top_p < 1.0, top_p, uncut) - uncounted - _MARGIN
    by_mass = tl.max(tl.where(below <= spare, bin_, 0), 0)
    by_number = tl.max(tl.where(from_here_up >= tl.minimum(top_k, LIMIT), bin_, 0), 0)
    by_share = tl.div_rn(min_p, mass).to(tl.int32, bitcast=True) >> _SHIFT
    looked_at = tl.maximum(tl.where(top_k > 0, by_number, 0), by_share)
    return tl.where((top_k > 0) | (min_p > 0.0), looked_at, by_mass)


@triton.jit(do_not_specialize_on_alignment=_PLAIN)
def _gather_kernel(
    logits_ptr,  # [B, V]
    parameters_ptr,  # [B, NUM_COLUMNS]
    partials_ptr,  # [B, 4, PARTS] float32
    histogram_ptr,  # [B, BINS] int32
    counters_ptr,  # [B, 2] int32
    candidates_ptr,  # [B, 2, CAPACITY] int32: bits and ids
    vocab_size,
    floor,
    MASS: tl.constexpr,
    LIMIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    numbers = parameters_ptr + row * _COLUMNS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if _is_gathered(numbers) == 0:
        return
    largest, mass, _, flawed = _summary(partials_ptr, row, PARTS, BLOCK_PARTS)
    if _is_usable(largest, flawed) == 0:
        return
    logits = logits_ptr + row * vocab_size
    bin_ = tl.arange(0, _BINS)
    counts = tl.load(histogram_ptr + row * _BINS + bin_, cache_modifier=".cg")
    from_here_up = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    edge = tl.max(tl.where(from_here_up >= LIMIT, bin_, 0), 0)
    edge = tl.maximum(
        edge, _sufficient_edge(counts, from_here_up, bin_, numbers, mass, floor * vocab_size, MASS, LIMIT)
    )
    low = edge << _SHIFT
    cut_id = vocab_size
    if tl.sum(tl.where(bin_ >= edge, counts, 0), 0) > CAPACITY:
        low, cut_id = _bisect(logits, numbers, largest, mass, floor, vocab_size, low, LIMIT, CHUNK)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bits = _probability_bits(logits, token, numbers, largest, mass, floor, vocab_size)
    is_candidate = ((bits > low) | ((bits == low) & (token < cut_id))).to(tl.int32)
    found = tl.sum(is_candidate, 0)
    if found > 0:
        place = tl.atomic_add(counters_ptr + row * 2, found, sem="relaxed") + tl.cumsum(is_candidate, 0) - 1
        candidates = candidates_ptr + row * 2 * CAPACITY + place
        tl.store(candidates, bits, mask=is_candidate != 0)
        tl.store(candidates + CAPACITY, token, mask=is_candidate != 0)


@triton.jit
def _mass_of(kept, sums, is_cut, LIMIT: tl.constexpr):
    """Mass of a leading run of candidates, by their running sums [N] float64; 1 where it goes on beyond them."""
    ends = is_cut & (tl.sum(kept.to(tl.int32), 0) < LIMIT)
    return tl.where(ends, tl.max(tl.where(kept, sums, 0.0), 0), 1.0)


@triton.jit
def _draw(
    candidates,  # [2, CAPACITY] int32: bits and ids
    place_ptr,  # [CAPACITY] int32
    mass_ptr,  # [CAPACITY] float64
    numbers,
    count,
    largest,
    next_id_ptr,  # [1] int32
    record,  # [NUM_FIELDS] int32
    support,  # [2, LIMIT] int32
    MASS: tl.constexpr,
    LIMIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Cut a row's candidates, SIZE of them at most, and draw one. Results do not depend on SIZE, bit for bit."""
    # Loads go past the first-level cache, which does not see what other processors wrote.
    all_ = tl.arange(0, SIZE)
    exists = all_ < count
    bits = tl.load(candidates + all_, mask=exists, other=0, cache_modifier=".cg")
    ids = tl.load(candidates + CAPACITY + all_, mask=exists, other=_NO_ID, cache_modifier=".cg")
    places = tl.load(place_ptr + all_, mask=exists, other=CAPACITY, cache_modifier=".cg")
    masses = tl.load(mass_ptr + all_, mask=exists, other=2.0, cache_modifier=".cg")
    probability = bits.to(tl.float32, bitcast=True)
    wide = probability.to(tl.float64)
    # Min-p and top-k, then top-p of what they leave, then the support. A set that does not end among the likeliest has
    # the whole mass.
    likeliest = exists & (places < LIMIT)
    min_p = tl.load(numbers + _MIN_P).to(tl.float32, bitcast=True)
    top_k = tl.load(numbers + _TOP_K)
    top_p = tl.load(numbers + _TOP_P).to(tl.float32, bitcast=True)
    last = tl.max(tl.where(likeliest & (places == top_k - 1), bits, 0), 0)  # of the top k, whose equals stay
    kept = likeliest & (probability >= min_p * tl.max(probability, 0)) & (bits >= last)
    is_cut = (min_p > 0.0) | (last > 0)
    whole = _mass_of(kept, masses + wide, is_cut, LIMIT)
    kept &= masses < tl.where(top_p < 1.0, top_p.to(tl.float64) * whole, _NO_MASS)
    whole = _mass_of(kept, masses + wide, is_cut | (top_p < 1.0), LIMIT)
    is_sparse = tl.load(numbers + _METHOD) == _SPARSE
    kept &= masses < tl.where(is_sparse, tl.full([SIZE], MASS, tl.float64) * whole, _NO_MASS)
    total = tl.max(tl.where(kept, masses + wide, 0.0), 0)
    scaled = (wide / total).to(tl.float32)
    if is_sparse:
        tl.store(support + places, ids, mask=kept)
        tl.store(support + LIMIT + places, scaled.to(tl.int32, bitcast=True), mask=kept)
    times = tl.log(scaled) + _noise_of(tl.where(exists, ids, 0), numbers, tl.load(numbers + _STREAM))
    times = tl.where(kept, times, float("-inf"))
    token = tl.min(tl.where(kept & (times == tl.max(times, 0)), ids, _NO_ID), 0)
    tl.store(next_id_ptr, token)
    tl.store(record, token)
    tl.store(record + 1, tl.where(is_sparse, tl.sum(kept.to(tl.int32), 0), 0))
    tl.store(record + 2, 1)
    tl.store(record + 3, largest.to(tl.int32, bitcast=True))


@triton.jit
def _answer_at_once(
    partial_ptr,  # [4, PARTS] float32
    best_ids_ptr,  # [PARTS] int32
    numbers,
    largest,
    best,
    flawed,
    next_id_ptr,  # [1] int32
    record,  # [NUM_FIELDS] int32
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Answer of a row without candidates: the token of the best part, none where the row is not usable."""
    usable = _is_usable(largest, flawed)
    index = tl.arange(0, BLOCK_PARTS)
    partial = partial_ptr + index
    bests = tl.load(partial + _BEST * PARTS, mask=index < PARTS, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(best_ids_ptr + index, mask=index < PARTS, other=_NO_ID, cache_modifier=".cg")
    if tl.load(numbers + _METHOD) == _GROUPED:
        bests = _group_scores(partial, index, numbers, PARTS)
        best = tl.max(bests, 0)
    token = tl.min(tl.where(bests == best, ids, _NO_ID), 0)
    tl.store(next_id_ptr, tl.where(usable, token, 0))
    tl.store(record, tl.where(usable, token, -1))
    tl.store(record + 1, 0)
    tl.store(record + 2, (flawed == 0).to(tl.int32))
    tl.store(record + 3, largest.to(tl.int32, bitcast=True))


@triton.jit
def _place(
    candidates,  # [2, CAPACITY] int32: bits and ids
    place_ptr,  # [CAPACITY] int32
    mass_ptr,  # [CAPACITY] float64
    num_finished_ptr,  # [1] int32
    first,
    count,
    CAPACITY: tl.constexpr,
    PLACED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Places of ``PLACED`` candidates among all by probability, then id, and the mass before each; true for the last
    program of the row.
    """
    mine = first + tl.arange(0, PLACED)
    my_bits = tl.load(candidates + mine, mask=mine < count, other=0)
    my_id = tl.load(candidates + CAPACITY + mine, mask=mine < count, other=0)
    ahead = tl.zeros([PLACED, COMPARED], tl.int32)
    weights = tl.zeros([PLACED, COMPARED], tl.float64)
    for start in range(0, count, COMPARED):
        other = start + tl.arange(0, COMPARED)
        bits = tl.load(candidates + other, mask=other < count, other=-1)
        ids = tl.load(candidates + CAPACITY + other, mask=other < count, other=_NO_ID)
        is_ahead = bits[None, :] > my_bits[:, None]
        is_ahead |= (bits[None, :] == my_bits[:, None]) & (ids[None, :] < my_id[:, None])
        ahead += is_ahead.to(tl.int32)
        wide = tl.maximum(bits, 0).to(tl.float32, bitcast=True).to(tl.float64)
        weights += tl.where(is_ahead, wide[None, :], 0.0)
    tl.store(place_ptr + mine, tl.sum(ahead, 1), mask=mine < count)
    tl.store(mass_ptr + mine, tl.sum(weights, 1), mask=mine < count)
    tl.debug_barrier()  # all of this program's stores come before its count
    return tl.atomic_add(num_finished_ptr, 1, sem="acq_rel") == tl.cdiv(count, PLACED) - 1


@triton.jit(do_not_specialize_on_alignment=[*_PLAIN, "step_ptr", "next_ids_ptr"])
def _finish_kernel(
    parameters_ptr,  # [B, NUM_COLUMNS]
    partials_ptr,  # [B, 4, PARTS] float32
    best_ids_ptr,  # [B, PARTS] int32
    counters_ptr,  # [B, 2] int32
    candidates_ptr,  # [B, 2, CAPACITY] int32
    places_ptr,  # [B, CAPACITY] int32
    masses_ptr,  # [B, CAPACITY] float64: what lies before each candidate
    step_ptr,  # [1] int32
    next_ids_ptr,  # [B] int32
    records_ptr,  # [K, B, NUM_FIELDS] int32
    supports_ptr,  # [K, B, 2, S] int32
    MASS: tl.constexpr,
    LIMIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PLACED: tl.constexpr,
    COMPARED: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    numbers = parameters_ptr + row * _COLUMNS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if _is_drawing(numbers) == 0:
        if part == 0:
            tl.store(next_ids_ptr + row, 0)
        return
    largest, _, best, flawed = _summary(partials_ptr, row, PARTS, BLOCK_PARTS)
    place = tl.load(step_ptr).to(tl.int64) * tl.num_programs(1) + row
    record = records_ptr + place * _FIELDS
    if (_is_gathered(numbers) == 0) | (_is_usable(largest, flawed) == 0):
        if part == 0:
            _answer_at_once(
                partials_ptr + row * 4 * PARTS, best_ids_ptr + row * PARTS, numbers, largest, best, flawed,
                next_ids_ptr + row, record, PARTS, BLOCK_PARTS,
            )  # fmt: skip
        return
    count = tl.load(counters_ptr + row * 2, cache_modifier=".cg")
    if part * PLACED >= count:
        return
    candidates = candidates_ptr + row * 2 * CAPACITY
    place_ptr, mass_ptr = places_ptr + row * CAPACITY, masses_ptr + row * CAPACITY
    counter_ptr = counters_ptr + row * 2 + 1
    if not _place(candidates, place_ptr, mass_ptr, counter_ptr, part * PLACED, count, CAPACITY, PLACED, COMPARED):
        return
    if count <= FEW:
        _draw(
            candidates, place_ptr, mass_ptr, numbers, count, largest, next_ids_ptr + row, record,
            supports_ptr + place * 2 * LIMIT, MASS, LIMIT, CAPACITY, FEW,
        )  # fmt: skip
    else:
        _draw(
            candidates, place_ptr, mass_ptr, numbers, count, largest, next_ids_ptr + row, record,
            supports_ptr + place * 2 * LIMIT, MASS, LIMIT, CAPACITY, CAPACITY,
        )  # fmt: skip


class TritonSampler:
    """See the contract."""

    def __init__(self, *, mass: float, limit: int) -> None:
        self._mass = mass
        self._limit = limit

    def __call__(self, logits: torch.Tensor, parameters: torch.Tensor, sink: DraftSink) -> None:
        """Draw one step from ``logits`` [B, V] by ``parameters`` [B, NUM_COLUMNS] int32."""
        num_rows, vocab_size = logits.shape
        parts = triton.cdiv(vocab_size, _CHUNK)
        capacity = max(_MIN_CAPACITY, 2 * triton.next_power_of_2(self._limit))
        floor = (1 - self._mass) / (2 * vocab_size) if self._mass <= _SURE_MASS else 0.0
        integers, options = {"dtype": torch.int32, "device": logits.device}, launch_options(logits)
        partials = torch.empty(num_rows, 4, parts, dtype=torch.float32, device=logits.device)
        best_ids = torch.empty(num_rows, parts, **integers)  # type: ignore[call-overload]
        histogram = torch.empty(num_rows, _BINS.value, **integers)  # type: ignore[call-overload]
        counters = torch.empty(num_rows, 2, **integers)  # type: ignore[call-overload]
        candidates = torch.empty(num_rows, 2, capacity, **integers)  # type: ignore[call-overload]
        places = torch.empty(num_rows, capacity, **integers)  # type: ignore[call-overload]
        masses = torch.empty(num_rows, capacity, dtype=torch.float64, device=logits.device)
        cut = {"PARTS": parts, "BLOCK_PARTS": triton.next_power_of_2(parts)}
        _reduce_kernel[(parts, num_rows)](
            logits, parameters, partials, best_ids, histogram, counters, vocab_size,
            PARTS=parts, CHUNK=_CHUNK, **options,
        )  # fmt: skip
        _histogram_kernel[(parts, num_rows)](
            logits, parameters, partials, histogram, vocab_size, floor, CHUNK=_CHUNK, **cut, **options
        )
        _gather_kernel[(parts, num_rows)](
            logits, parameters, partials, histogram, counters, candidates, vocab_size, floor,
            MASS=self._mass, LIMIT=self._limit, CAPACITY=capacity, CHUNK=_CHUNK, **cut, **options,
        )  # fmt: skip
        _finish_kernel[(capacity // _PLACED, num_rows)](
            parameters, partials, best_ids, counters, candidates, places, masses, sink.step,
            sink.next_ids, sink.records, sink.supports,
            MASS=self._mass, LIMIT=self._limit, CAPACITY=capacity, PLACED=_PLACED, COMPARED=_COMPARED,
            FEW=min(FEW, capacity), **cut, **options,
        )  # fmt: skip
