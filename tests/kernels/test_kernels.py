"""Each kernel against a plain statement of its contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.kernels.kv_store import copy_pages, store_kv
from outrider.kernels.linear import PreparedWeight, prepare_weight
from outrider.kernels.linear.reference import PackedWeight, PlainWeight, UpcastWeight, can_pack
from outrider.kernels.ordering import largest, largest_of_blocks
from outrider.kernels.paged_attention import paged_attention, plan_attention
from outrider.kernels.rms_norm import PreparedNorm, prepare_norm
from outrider.kernels.rms_norm.reference import FewOpsNorm, ReferenceNorm
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.input_batch import ForwardRow, plan_forward
from tests.support.scattering import take_every_other_page

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend_naively(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    window: int | None,
    num_sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query [H, D] at ``position`` over [C, H_kv, D], head by head."""
    first = 0 if window is None else max(0, position - window + 1)
    visible = [key for key in range(position + 1) if key >= first or key < num_sinks]
    group = query.shape[0] // keys.shape[1]
    rows = []
    for head in range(query.shape[0]):
        seen = keys[visible, head // group]
        scores = seen @ query[head] * query.shape[1] ** -0.5
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[head : head + 1]))
        rows.append(torch.softmax(scores, 0)[: len(visible)] @ values[visible, head // group])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("window", "num_sinks"), [(None, 0), (1, 0), (4, 0), (100, 0), (1, 1), (4, 2), (4, 5), (100, 3)]
)
@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("scattered", [False, True])
def test_paged_attention_reads_its_context_and_nothing_else(
    scattered: bool, heads: tuple[int, int], window: int | None, num_sinks: int, has_logits: bool
) -> None:
    num_heads, num_kv_heads = heads
    table = KVCacheManager(PagePool(60, 3))
    if scattered:
        take_every_other_page(table)
    sequences = [table.open(30) for _ in range(3)]
    for sequence, length in zip(sequences, (0, 7, 12), strict=True):
        table.extend(sequence, [0] * length)
    rows = [ForwardRow(sequence, [0] * count) for sequence, count in zip(sequences, (9, 1, 4), strict=True)]
    batch = plan_forward(table, rows)
    kv = torch.full((180, 2, num_kv_heads, 8), float("nan"))
    for sequence in sequences:
        slots = [sequence.page_table[p // 3] * 3 + p % 3 for p in range(sequence.length)]
        kv[slots] = torch.randn(len(slots), 2, num_kv_heads, 8)
    query, logits = torch.randn(14, num_heads, 8), torch.randn(num_heads) if has_logits else None
    plan = plan_attention(batch, page_size=3, window=window, device=CPU, dtype=torch.float32, num_sinks=num_sinks)
    assert num_sinks or any(row.slots is not None for row in plan.rows) == scattered
    attended = paged_attention(query, kv, plan, sink_logits=logits)
    index = 0
    for sequence, row in zip(sequences, rows, strict=True):
        slots = [sequence.page_table[p // 3] * 3 + p % 3 for p in range(sequence.length)]
        keys, values = kv[slots].unbind(1)
        for position in range(sequence.length - len(row.token_ids), sequence.length):
            expected = attend_naively(query[index], keys, values, position, window, num_sinks, logits)
            torch.testing.assert_close(attended[index], expected, atol=1e-5, rtol=0)
            index += 1


def test_store_writes_its_slots_and_no_others() -> None:
    kv = torch.full((12, 2, 1, 2), float("nan"))
    content = torch.randn(3, 2, 1, 2)
    store_kv(kv, torch.tensor([7, 0, 11]), content)
    torch.testing.assert_close(kv[[7, 0, 11]], content)
    assert kv[[1, 2, 3, 4, 5, 6, 8, 9, 10]].isnan().all()


def test_copies_read_every_source_before_writing() -> None:
    cache = torch.arange(2 * 6 * 2, dtype=torch.float32).view(2, 6, 2, 1, 1)
    before = cache.clone()
    copy_pages(cache, [(0, 1), (1, 2)], page_size=2)
    torch.testing.assert_close(cache[:, 2:4], before[:, 0:2])
    torch.testing.assert_close(cache[:, 4:6], before[:, 2:4])
    copy_pages(cache, [], page_size=2)
    torch.testing.assert_close(cache[:, 0:2], before[:, 0:2])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [PlainWeight, PackedWeight])
def test_float32_products(form: Callable[[torch.Tensor], PreparedWeight], bias: bool, rows: int) -> None:
    if isinstance(form, type) and issubclass(form, PackedWeight) and not can_pack(torch.float32):
        pytest.skip("this build of torch does not pack weights")
    weight, x = torch.randn(24, 48), torch.randn(rows, 48)
    offset = torch.randn(24) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(form(weight)(x, offset).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 7, 8, 40])
def test_bfloat16_products_are_rounded_once(rows: int) -> None:
    weight, x, bias = torch.randn(24, 48).bfloat16(), torch.randn(rows, 48).bfloat16(), torch.randn(24).bfloat16()
    expected = x.double() @ weight.double().T + bias.double()
    for product in (UpcastWeight(weight)(x, bias), prepare_weight(weight)(x, bias)):
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product.double(), expected, atol=0.02, rtol=2**-7)


def test_small_weights_and_kept_layouts_are_not_packed() -> None:
    assert isinstance(prepare_weight(torch.randn(16, 16)), PlainWeight)
    assert isinstance(prepare_weight(torch.randn(1024, 256), keep_layout=True), PlainWeight)
    if can_pack(torch.float32):
        assert isinstance(prepare_weight(torch.randn(1024, 256)), PackedWeight)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("form", [FewOpsNorm, ReferenceNorm])
def test_rms_norm(form: Callable[[torch.Tensor, float], PreparedNorm], scale: float) -> None:
    x, weight = torch.randn(5, 33) * scale, torch.randn(33)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    before = x.clone()
    torch.testing.assert_close(form(weight, 1e-6)(x).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x, before)
    assert isinstance(prepare_norm(weight.bfloat16(), 1e-6), ReferenceNorm)


def best_first(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_the_largest_of_any_shape(num_rows: int, width: int) -> None:
    values = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(num_rows))
    values[:, 9] = values[:, 3]  # equals: the lower id first
    ordered, token_ids = largest(values, width)
    by_hand = [best_first(row)[:width] for row in values.tolist()]
    assert token_ids.tolist() == by_hand
    assert torch.equal(ordered, values.gather(-1, token_ids))


@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_largest_of_blocks_are_the_largest(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(-9, 9, (40, 64 * 20), generator=generator).float()  # most are equal to others
    values[1] = -torch.inf
    values[2, 200:] = -torch.inf
    for found, expected in zip(largest_of_blocks(values, width), largest(values, width), strict=True):
        assert torch.equal(found, expected)
