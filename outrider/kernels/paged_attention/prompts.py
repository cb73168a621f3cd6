# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``paged_attention`` of long prompts, and of long chunks of them, by cuDNN's kernel.

That kernel is faster than ``chunks``, but knows no pages, makes a plan for each shape that it meets, and its causal
mask begins at the first key. So a row's pages are copied together first, and its positions are cut into blocks, from 0
on: a block's queries, padded to one of a few sizes, attend their own block with a causal mask and each block before it
without any, and the results are joined by their log-sum-exps. Lengths have to be known on the host, so this is for
forwards that are launched without a graph.

Shape letters: ``Q`` queries of a row, ``C`` its context, ``S`` queries of a block, padded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.paged_attention.device_plan import DevicePlan, RowSpan

BLOCK = 4096
"""Positions."""
STEP = 2048
"""Granularity of sizes."""
MIN_QUERIES = 3072
"""Least number of a row's queries; with fewer, ``chunks`` is as fast."""
MAX_WASTE_RATIO = 1.25
"""Work with padding over work without; beyond, ``chunks`` is faster."""
_ALIGNED = 8
"""Sizes of heads that the library takes are multiples of it."""
_WIDEST_HEAD, _WIDE = 128, 91_000
"""Size of heads; release of the library from which it takes twice as much on compute capability 9.0."""
_HEADS = 8
"""Heads of a token that one program joins."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a row whose positions are in one block."""

    start: int
    """The block's first position."""
    first: int
    stop: int
    """Positions of the queries."""

    @property
    def size(self) -> int:
        """Positions from ``start`` on that are attended together."""
        return -(-(self.stop - self.start) // STEP) * STEP

    @property
    def cost(self) -> float:
        """Pairs of queries and keys that are computed."""
        return self.size * (self.start + self.size / 2)


def blocks_of(num_queries: int, context: int) -> Iterator[Block]:
    """Blocks of a row whose last tokens are the queries."""
    first = context - num_queries
    for start in range(first // BLOCK * BLOCK, context, BLOCK):
        yield Block(start, max(start, first), min(start + BLOCK, context))


def takes_prompts(query: torch.Tensor, plan: DevicePlan) -> bool:
    """True if all rows see all of their contexts, and are long enough and so cut that little is padding."""
    spans, fits_pages = plan.rows.spans, BLOCK % plan.page_size == 0
    return bool(spans) and fits_pages and _has_library(query) and all(_suits(span, plan.window) for span in spans)


def _suits(span: RowSpan, window: int | None) -> bool:
    pairs = span.num_queries * (span.context - span.num_queries / 2)
    cost = sum(block.cost for block in blocks_of(span.num_queries, span.context))
    sees_all = window is None or span.context <= window
    return sees_all and span.num_queries >= MIN_QUERIES and cost <= MAX_WASTE_RATIO * pairs


def _has_library(query: torch.Tensor) -> bool:
    """True where the library's attention is used; on a CPU it is only tested."""
    return query.shape[-1] % _ALIGNED == 0 if query.device.type == "cpu" else takes_heads(query.shape[-1], query.device)


@functools.cache
def takes_heads(head_dim: int, device: torch.device) -> bool:
    """True if the library attends with heads of this size on a GPU, by the bounds that PyTorch has for it."""
    if head_dim % _ALIGNED or not torch.backends.cudnn.is_available():
        return False
    has_wide = torch.cuda.get_device_capability(device) == (9, 0) and (torch.backends.cudnn.version() or 0) >= _WIDE
    return head_dim <= (2 * _WIDEST_HEAD if has_wide else _WIDEST_HEAD)


def attend_prompts(
    query: torch.Tensor, kv: torch.Tensor, plan: DevicePlan, *, scale: float | None = None
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over ``kv`` [S, 2, H_kv, D]; returns [T, H, D]; ``takes_prompts`` says for what."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for span in plan.rows.spans:
        past, pages = span.context - span.num_queries, _Pages(kv, plan, span)
        for block in blocks_of(span.num_queries, span.context):
            rows = slice(span.first_query + block.first - past, span.first_query + block.stop - past)
            places = slice(block.first - block.start, block.stop - block.start)
            out[rows] = _attend_block(_padded(query[rows], places, block.size), pages, block, scale)[places]
    return out


def _padded(queries: torch.Tensor, places: slice, size: int) -> torch.Tensor:
    """``queries`` [n, H, D] at some places of [size, H, D]."""
    if len(queries) == size:
        return queries.contiguous()
    padded = queries.new_zeros(size, *queries.shape[1:])
    padded[places] = queries
    return padded


@dataclass(frozen=True, slots=True)
class _Pages:
    """Keys and values of a row."""

    kv: torch.Tensor  # [S, 2, H_kv, D]
    plan: DevicePlan
    span: RowSpan

    def copied(self, start: int, size: int) -> torch.Tensor:
        """Keys and values of ``size`` positions from ``start`` on, [size, 2, H_kv, D]; zero where nothing is."""
        page_size, kv = self.plan.page_size, self.kv
        present = min(size, self.span.context - start)
        first, num_pages = self.span.first_page + start // page_size, -(-present // page_size)
        found = torch.empty(-(-size // page_size) * page_size, *kv.shape[1:], dtype=kv.dtype, device=kv.device)
        by_page = kv.view(-1, page_size * kv[0].numel())
        pages = self.plan.rows.pages[first : first + num_pages]
        torch.index_select(by_page, 0, pages, out=found[: num_pages * page_size].view(num_pages, -1))
        found[present:].zero_()  # what was not written may be no number, which a mask does not hide
        return found[:size]


def _attend_block(queries: torch.Tensor, pages: _Pages, block: Block, scale: float | None) -> torch.Tensor:
    """``queries`` [S, H, D] of a block over it and all before; [S, H, D], in float32 where there are any."""
    found, sums = _attend(queries, pages.copied(block.start, block.size), is_causal=True, scale=scale)
    for start in range(0, block.start, BLOCK):
        found, sums = join(found, sums, *_attend(queries, pages.copied(start, BLOCK), is_causal=False, scale=scale))
    return found


def make_plans(num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Attend once in each shape that there can be, for which the library makes a plan the first time."""
    keys_values = torch.zeros(BLOCK, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    for size in range(STEP, BLOCK + 1, STEP):
        queries = torch.zeros(size, num_heads, head_dim, dtype=dtype, device=device)
        join(*_attend(queries, keys_values[:size], is_causal=True), *_attend(queries, keys_values, is_causal=False))


def _attend(
    queries: torch.Tensor, keys_values: torch.Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``queries`` [S, H, D] over ``keys_values`` [C, 2, H_kv, D]: [S, H, D], and the scores' log-sum-exps [H, S]
    float32.
    """
    query, keys, values = (part.transpose(0, 1)[None] for part in (queries, keys_values[:, 0], keys_values[:, 1]))
    if queries.device.type == "cpu":  # where it is but tested
        group = queries.shape[1] // keys_values.shape[2]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, is_causal, scale=scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, is_causal, scale=scale
        )
    sums = found[1].reshape(queries.shape[1], len(queries)).contiguous()
    return found[0][0].transpose(0, 1), sums


@triton.jit(do_not_specialize=["num_queries"])
def _join_kernel(
    left_ptr,  # [S, H, D], strides given
    left_sum_ptr,  # [H, S] float32
    right_ptr,  # [S, H, D], strides given
    right_sum_ptr,  # [H, S] float32
    out_ptr,  # [S, H, D] float32
    out_sum_ptr,  # [H, S] float32
    num_queries,
    left_stride,
    left_head_stride,
    right_stride,
    right_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    inside = is_head[:, None] & (d < HEAD_DIM)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    left_sum = tl.load(left_sum_ptr + head * num_queries + query, mask=is_head, other=0.0)
    right_sum = tl.load(right_sum_ptr + head * num_queries + query, mask=is_head, other=0.0)
    largest = tl.maximum(left_sum, right_sum)
    left_mass, right_mass = tl.exp(left_sum - largest), tl.exp(right_sum - largest)
    share = (left_mass / (left_mass + right_mass))[:, None]
    place = query * left_stride + head[:, None] * left_head_stride + d[None, :]
    left = tl.load(left_ptr + place, mask=inside, other=0.0).to(tl.float32)
    place = query * right_stride + head[:, None] * right_head_stride + d[None, :]
    right = tl.load(right_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + (query * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out, left * share + right * (1.0 - share), mask=inside)
    tl.store(out_sum_ptr + head * num_queries + query, largest + tl.log(left_mass + right_mass), mask=is_head)


def join(
    left: torch.Tensor, left_sum: torch.Tensor, right: torch.Tensor, right_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [S, H, D] over two sets of keys, each over its own sum [H, S], as that over all of them and its sum,
    float32.
    """
    num_queries, num_heads, head_dim = left.shape
    out = torch.empty(left.shape, dtype=torch.float32, device=left.device)
    out_sum = torch.empty_like(left_sum)
    _join_kernel[(num_queries, triton.cdiv(num_heads, _HEADS))](
        left, left_sum, right, right_sum, out, out_sum, num_queries, left.stride(0), left.stride(1), right.stride(0),
        right.stride(1), NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_H=_HEADS,
        BLOCK_D=triton.next_power_of_2(head_dim), **launch_options(left),
    )  # fmt: skip
    return out, out_sum
