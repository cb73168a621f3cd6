"""Batch-invariant kernels and models: the bits of a row alone are its bits among any others.

``conftest.py`` collects it where there is a GPU. On a CPU, ``test_scoring_triton.py`` runs it in Triton's interpreter,
with few shapes. Where products are compared there they add up column by column, elsewhere in the order of their blocks
of K, so that tiles of one depth are compared. Programs run in random order.
Negative controls show that what is compared here does find sums whose order follows the number of rows or the programs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from outrider.kernels.fp8_linear import FP8
from outrider.kernels.linear.invariant import InvariantWeight
from outrider.kernels.linear.ordered import OrderedTiling, ordered_product
from outrider.kernels.linear.skinny import skinny_product
from outrider.kernels.paged_attention import (
    DevicePlan,
    paged_attention,
    plan_attention,
    prepare_plan,
    reference,
)
from outrider.kernels.paged_attention import kernel as fast_attention
from outrider.kernels.paged_attention.device_plan import AttentionTiling
from outrider.kernels.paged_attention.invariant import attend_segments
from outrider.kernels.paged_attention.segment_schedule import (
    SegmentTiling,
    choose_segment_tiling,
    scheduled_segments,
)
from outrider.kernels.rms_norm.kernel import TritonNorm
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, pack, unpack
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.sampling.logprobs import drawable_logprobs
from tests.kernels.triton_cases import DEVICE, NARROW, check, on_cpu, ragged_batch, random
from tests.model_executor.invariant_shapes import Comparison, Sizes
from tests.support.tiny_models import cached_tiny_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
ROWS = (1, 2, 5, 17, 40, 260) if INTERPRETED else (*range(1, 301), 504, 512, 1000, 4096)
MOST_ROWS = max(ROWS)
_MOST_SEQUENCES = 512
_LONGEST_NORM = 8192
SHARPEST = torch.float32 if INTERPRETED else torch.float16
"""Type whose rounding hides least."""
_OF_TEXTS = torch.float16 if INTERPRETED else torch.bfloat16
Product = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> Iterable[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def column_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter that add up column by column, as the matrix unit does: numpy's follow the tile."""
    if INTERPRETED:
        from triton.runtime import interpreter

        internals: Any = interpreter

        def create_dot(_: Any, left: Any, right: Any, before: Any, *__: Any) -> Any:
            total = before.data.copy()
            for column in range(left.data.shape[1]):
                total += left.data[:, column, None].astype(total.dtype) * right.data[column]
            return internals.TensorHandle(total, before.dtype.scalar)

        monkeypatch.setattr(internals.InterpreterBuilder, "create_dot", create_dot)


def repeats(compute: Callable[[], torch.Tensor]) -> bool:
    """True if the same launches give the same bits."""
    first = compute()
    return all(torch.equal(compute(), first) for _ in range(4 if INTERPRETED else 50))


def differing_rows(product: Product, x: torch.Tensor, counts: Iterable[int] = ROWS) -> list[int]:
    """Numbers of rows with which some row of the product has other bits than among all rows of ``x``."""
    whole = product(x)
    assert torch.isfinite(whole).all()
    found = []
    for count in counts:
        first = (len(x) - count) // 2  # whatever its place
        if not torch.equal(product(x[first : first + count].clone()), whole[first : first + count]):
            found.append(count)
    return found


SHAPES = [(2048, 8192), (4096, 1000), (6144, 4096), (70_000, 512), (128, 2048), (2, 2048), (2048, 320), (2048, 672)]
if INTERPRETED:
    SHAPES = [(128, 512), (256, 320), (256, 256), (96, 72), (2, 256)]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("outputs", "size"), SHAPES)
def test_products_are_right(outputs: int, size: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, size, dtype=dtype) * 0.1, random(outputs, dtype=dtype)
    product = InvariantWeight(weight)
    for rows in (1, 20, 300):
        x = random(rows, size, dtype=dtype)
        truth = x.double() @ weight.double().T
        partials = product.partials(x, None)
        check(partials if partials.dim() == 2 else partials.sum(0), truth, dtype)
        gate, up = truth.chunk(2, -1)
        check(product.gated(x, None), F.silu(gate) * up, dtype)
        check(product(x, bias), truth + bias.double(), dtype)
    assert product(random(0, size, dtype=dtype), bias).shape == (0, outputs)


@pytest.mark.usefixtures("column_order")
@pytest.mark.parametrize("dtype", [SHARPEST] if INTERPRETED else NARROW)
@pytest.mark.parametrize(("outputs", "size"), SHAPES[: 2 if INTERPRETED else None])
def test_products_of_any_number_of_rows_have_the_same_bits(outputs: int, size: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, size, dtype=dtype) * 0.1, random(outputs, dtype=dtype)
    product, x = InvariantWeight(weight), random(MOST_ROWS, size, dtype=dtype)
    assert not differing_rows(lambda x: product(x, None), x)
    assert not differing_rows(lambda x: product(x, bias), x, (1, 17, 300))
    assert not differing_rows(lambda x: product.gated(x, None), x)
    norm = TritonNorm(torch.ones(outputs, dtype=dtype, device=DEVICE), 1e-6)

    def normed(x: torch.Tensor) -> torch.Tensor:
        """The norm adds up what the product leaves, or takes what is added up."""
        return norm.after_adding(torch.ones(len(x), outputs, dtype=dtype, device=DEVICE), product.partials(x, None))

    if outputs <= _LONGEST_NORM:
        assert not differing_rows(normed, x)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("is_gated", [False, True])
def test_tiles_do_not_change_bits(parts: int, *, is_gated: bool) -> None:
    weight, x = random(192, 512, dtype=torch.float16), random(70, 512, dtype=torch.float16)
    tilings = (
        OrderedTiling(16, 64, 64, 4, 3),
        OrderedTiling(64, 64, 64, 4, 3, fetched=64),
        OrderedTiling(32, 128, 64, 8, 3, band=2, per_processor=1),
    )
    one, *others = (ordered_product(x, weight, None, tiling, parts=parts, is_gated=is_gated) for tiling in tilings)
    assert all(torch.equal(one, other) for other in others)


def test_parts_that_follow_the_rows_are_found() -> None:
    """Negative control."""
    weight, x = random(192, 512, dtype=SHARPEST), random(40, 512, dtype=SHARPEST)
    tiling = OrderedTiling(16, 64, 64, 4, 3)

    def follows(x: torch.Tensor) -> torch.Tensor:
        return ordered_product(x, weight, None, tiling, parts=1 if len(x) < 10 else 2)

    assert set(differing_rows(follows, x, (1, 2, 5, 17))) >= {5}


@triton.jit  # type: ignore[untyped-decorator]
def _atomic_kernel(addends_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    i = tl.arange(0, SIZE)
    tl.atomic_add(out_ptr + i, tl.load(addends_ptr + tl.program_id(0) * SIZE + i))


@pytest.mark.usefixtures("any_order")
def test_atomic_sums_are_found() -> None:
    """Negative control."""
    addends = random(64, 128, dtype=torch.float32)

    def add_up() -> torch.Tensor:
        out = torch.zeros(128, device=DEVICE)
        _atomic_kernel[(len(addends),)](addends, out, SIZE=128)
        return out

    assert not repeats(add_up)


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("rows", [1, 20])
def test_sums_do_not_depend_on_the_order_of_programs(rows: int) -> None:
    product, x = InvariantWeight(random(128, 512, dtype=SHARPEST)), random(rows, 512, dtype=SHARPEST)
    assert repeats(lambda: product(x, None))
    text = Text(LENGTH, dtype=SHARPEST)
    assert repeats(lambda: text.attend([(LENGTH, 1), (LENGTH // 2, rows)], None, 0, TILINGS[0]))


TILINGS = (
    (SegmentTiling(16, 16, 4, 2), SegmentTiling(32, 16, 4, 2, per_processor=1, slots_per_part=0))
    if INTERPRETED
    else (SegmentTiling(16, 64, 4, 2), SegmentTiling(64, 64, 4, 2, 4), SegmentTiling(128, 64, 8, 3, 1, 0))
)
LENGTH = 200 if INTERPRETED else 3000


class Text:
    """Queries, keys and values of a text in pages."""

    def __init__(
        self, length: int, *, head_dim: int = 16, cached: torch.dtype | None = None, dtype: torch.dtype = _OF_TEXTS
    ) -> None:
        heads, kv_heads = 4, 2
        self.length, self.page_size = length, 4
        self.heads = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        self.dtype = dtype
        self.query = random(length, heads, head_dim, dtype=self.dtype)
        self.keys_values = random(length, 2, kv_heads, head_dim, dtype=self.dtype).to(cached or self.dtype)

    def attend(
        self, spans: list[tuple[int, int]], window: int | None = None, sinks: int = 0,
        tiling: SegmentTiling | None = None, *, sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of rows that are the text's beginnings: (context, queries) of each."""
        plan, kv, query = self.inputs(spans, window, sinks)
        if tiling is None:
            prepared = prepare_plan(plan, num_tokens=len(query), dtype=self.dtype, **self.heads)
            return paged_attention(query, kv, prepared, sink_logits=sink_logits)
        return attend_segments(query, kv, plan, tiling=tiling, sink_logits=sink_logits)

    def inputs(
        self, spans: list[tuple[int, int]], window: int | None = None, sinks: int = 0
    ) -> tuple[DevicePlan, torch.Tensor, torch.Tensor]:
        contexts, queries = ([span[i] for span in spans] for i in (0, 1))
        pages = 2 * sum(-(-context // self.page_size) for context in contexts) + 8
        batch, slots = ragged_batch(self.page_size, contexts, queries, num_pages=pages)
        kv = torch.full((pages * self.page_size, *self.keys_values.shape[1:]), NAN, dtype=self.dtype, device=DEVICE)
        kv = kv.to(self.keys_values.dtype)
        kv.view(torch.uint8)[slots] = torch.cat([self.keys_values[:context].view(torch.uint8) for context in contexts])
        query = torch.cat([self.query[context - count : context] for context, count in spans])
        counters = torch.zeros(600, dtype=torch.int32, device=DEVICE)
        frame = BatchFrame(self.page_size, (window,), counters, (sinks,), batch_invariant=True)
        numbers = torch.from_numpy(pack(batch, BatchShape.of(batch))).to(DEVICE)
        plan = unpack(numbers, BatchShape.of(batch), frame, 0).groups[0].plan
        assert isinstance(plan, DevicePlan)
        return plan, kv, query


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (50, 0), (50, 3)])
def test_attention_is_right(window: int | None, sinks: int) -> None:
    text, spans = Text(300), [(20, 1), (300, 3), (130, 70), (1, 1)]
    plan, kv, query = text.inputs(spans, window, sinks)
    batch, _ = ragged_batch(4, [context for context, _ in spans], [count for _, count in spans], num_pages=len(kv) // 4)
    plain = plan_attention(
        batch, page_size=4, window=window, num_sinks=sinks, device=torch.device("cpu"), dtype=torch.float64
    )
    all_options: list[dict[str, Any]] = [
        {}, {"scale": 0.7, "softcap": 1.5}, {"sink_logits": random(4, dtype=torch.float32)},
    ]  # fmt: skip
    for options in all_options:
        truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain, **on_cpu(options))
        for tiling in TILINGS:
            check(attend_segments(query, kv, plan, tiling=tiling, **options), truth, text.dtype)
    assert not plan.rows.counters.any()


@pytest.mark.parametrize("vocab_size", [1000, 2049] if INTERPRETED else [1000, 32_001, 128_256, 151_936])
def test_logprobs_of_a_row_have_the_same_bits_among_others(vocab_size: int) -> None:
    logits = random(40, vocab_size, dtype=torch.float32)
    for rows in (logits, logits.flip(0)):
        whole = drawable_logprobs(rows, vocab_size - 3)
        for first, count in ((0, 1), (7, 1), (8, 5), (3, 17)):
            found = drawable_logprobs(rows[first : first + count], vocab_size - 3)
            assert torch.equal(found, whole[first : first + count]), (first, count)


SPANS = (
    [(200, 1)],
    [(200, 17)],
    [(131, 40)],
    [(9, 1), (200, 3), (70, 1)],
    [(40, 1)] * 20,
)
UNEVEN_SPANS = ([(3000, 1), (65, 1)], [(700, 4), (3000, 5), (1, 1)], [(3000, 900), (10, 1), (2000, 2)])
LONG_SPANS = (
    *UNEVEN_SPANS,  # first, for they show most
    *([(context, queries)] for context in (64, 65, 129, 1000, 2049, 3000) for queries in (1, 4, 17, 60)),
    [(3000, 1)] * 3,
    [(3000, 1)] * 300,
)


def _tilings_for(spans: list[tuple[int, int]], head_dim: int) -> tuple[SegmentTiling | None, ...]:
    """Each takes long to compile: on a GPU all are used for few batches."""
    if INTERPRETED:
        return TILINGS
    return (None, *TILINGS) if head_dim <= 128 and spans in UNEVEN_SPANS else (None,)


@pytest.mark.parametrize(
    ("window", "sinks", "has_logits"),
    [(None, 0, False), (50, 0, False), (50, 3, False), (None, 0, True), (50, 0, True)],
)
@pytest.mark.parametrize(
    ("head_dim", "cached"), [(16, None)] if INTERPRETED else [(16, None), (128, None), (128, FP8), (256, None)]
)
def test_attention_has_the_same_bits_in_any_batch_and_chunk(
    window: int | None, sinks: int, has_logits: bool, head_dim: int, cached: torch.dtype | None
) -> None:
    text = Text(LENGTH, head_dim=head_dim, cached=cached, dtype=torch.float16 if head_dim == 128 else _OF_TEXTS)
    logits = random(4, dtype=torch.float32) if has_logits else None
    tiling = TILINGS[-1] if INTERPRETED or head_dim <= 128 else None
    whole = text.attend([(LENGTH, LENGTH)], window, sinks, tiling, sink_logits=logits)
    for spans in SPANS if INTERPRETED else LONG_SPANS:
        expected = torch.cat([whole[context - count : context] for context, count in spans])
        for tiling in _tilings_for(spans, head_dim):
            found = text.attend(spans, window, sinks, tiling, sink_logits=logits)
            assert torch.equal(found, expected), (spans, tiling)


@pytest.mark.parametrize("head_dim", [16] if INTERPRETED else [64, 80, 128])
def test_attention_has_the_same_bits_with_every_number_of_rows(head_dim: int) -> None:
    """Rows of several lengths, and the last queries of a text."""
    counts, tiling = (ROWS[:-2], TILINGS[0]) if INTERPRETED else (ROWS, None)
    text = Text(max(LENGTH, *counts), head_dim=head_dim)
    whole = text.attend([(text.length, text.length)], None, 0, tiling)
    for count in counts:
        queries = 1 if count <= _MOST_SEQUENCES else 8
        rows = [(queries + 37 * row % 130, queries) for row in range(count // queries)]
        rows[len(rows) // 3] = (text.length, queries)
        for spans in (rows, [(text.length, count)]):
            expected = torch.cat([whole[context - asked : context] for context, asked in spans])
            assert torch.equal(text.attend(spans, None, 0, tiling), expected), (count, len(spans))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_of_keys_do_not_follow_the_batch(head_dim: int) -> None:
    batches = itertools.product((1, 20, 300), (1, 5, 17, 4000), (1, 4, 8))
    assert {choose_segment_tiling(*batch, head_dim).block_n for batch in batches} == {64}


def test_keys_of_few_rows_are_divided() -> None:
    text = Text(LENGTH)
    plan, _, _ = text.inputs([(LENGTH, 1)])
    schedule = scheduled_segments(plan, num_tokens=1, tiling=TILINGS[0], **text.heads).schedule
    assert schedule is not None
    assert int(schedule[6][schedule[0] > 0].max()) > 1


def test_attention_whose_parts_follow_the_rows_is_found() -> None:
    """Negative control: the other mode's kernel."""
    text = Text(LENGTH)
    plan, kv, query = text.inputs([(LENGTH, 1)])
    tiling = AttentionTiling(16, 16, 4, 2)
    found = [fast_attention.paged_attention(query, kv, plan, tiling=tiling, budget=budget) for budget in (1, 3)]
    assert not torch.equal(*found)


def invariant_runner(architecture: str, quantization: Literal["none", "fp8"]) -> ModelRunner:
    return ModelRunner.load(
        cached_tiny_model(architecture, seed=1), device=DEVICE, dtype="float16" if INTERPRETED else "bfloat16",
        page_size=4, num_pages=8000, batch_invariant="on", quantization=quantization, num_state_slots=300,
    )  # fmt: skip


def logits_of(runner: ModelRunner, text: list[int], cuts: list[int], beside: int) -> torch.Tensor:
    """Logits of every position of a text that is computed in chunks, each with as many other rows."""
    sequence, others = runner.sequences.open(len(text)), [runner.sequences.open(len(cuts)) for _ in range(beside)]
    found, first = [], 0
    for number, stop in enumerate(cuts):
        rows = [ForwardRow(other, [5 + (7 * place + number) % 200], 1) for place, other in enumerate(others)]
        chunk = ForwardRow(sequence, text[first:stop], stop - first)
        rows.insert(beside // 2, chunk)
        logits = runner.forward(rows)
        found.append(logits[beside // 2 : beside // 2 + stop - first].clone())
        first = stop
    for one in (sequence, *others):
        runner.sequences.release(one)
    return torch.cat(found)


def split_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """``skinny_product`` of two halves of K, each rounded."""
    half = x.shape[1] // 2
    parts = (slice(0, half), slice(half, x.shape[1]))
    found = [skinny_product(x[:, part].contiguous(), weight[:, part].contiguous(), None, *rest) for part in parts]
    return found[0] + found[1] + (0 if bias is None else bias)


def test_a_model_whose_sums_follow_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("outrider.kernels.linear.invariant.skinny_product", split_product)
    runner = invariant_runner("llama", "none")
    text = list(range(3, 15))
    assert not torch.equal(logits_of(runner, text, list(range(1, 13)), 0), logits_of(runner, text, [12], 0))


ARCHITECTURES = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gemma2", "gemma3_text", "olmo2",
    "qwen3_5_text",
][: 1 if INTERPRETED else None]  # fmt: skip


_LENGTHS = {"qwen3_5_text": 100}
"""Lengths of texts: models with recurrent layers get more tokens than they follow one by one in the other mode."""
MODELS: list[tuple[str, Literal["none", "fp8"]]] = [*((name, "none") for name in ARCHITECTURES), ("llama", "fp8")]


@pytest.mark.parametrize(("architecture", "quantization"), MODELS)
def test_logits_of_a_model_have_the_same_bits_in_any_batch_and_chunk(
    architecture: str, quantization: Literal["none", "fp8"]
) -> None:
    length = _LENGTHS.get(architecture, 24)
    text = [3 + (11 * place * place) % 230 for place in range(length)]
    runner = invariant_runner(architecture, quantization)
    assert runner.batch_invariant
    whole = logits_of(runner, text, [length], 0)
    assert torch.isfinite(whole).all()
    for beside in (3,) if INTERPRETED else (0, 1, 2, 7, 30, 100, 250):
        for cuts in ([length], [9, 10, length], list(range(1, length + 1)))[: 2 if INTERPRETED else 3]:
            assert torch.equal(logits_of(runner, text, cuts, beside), whole), (beside, cuts)


@pytest.mark.skipif(INTERPRETED, reason="takes long")
@pytest.mark.parametrize("model", [("llama", "none"), ("llama", "fp8"), ("qwen3_moe", "none"), ("gpt_oss", "none")])
def test_logits_of_a_model_have_the_same_bits_with_every_number_of_tokens(
    model: tuple[str, Literal["none", "fp8"]],
) -> None:
    counts = [count for count in ROWS if count <= _MOST_SEQUENCES]
    sizes = Sizes(length=24, counts=counts, most_rows=_MOST_SEQUENCES, companies=())
    assert not list(Comparison(invariant_runner(*model), sizes).differing())
