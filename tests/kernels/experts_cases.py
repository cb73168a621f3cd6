"""The kernels of experts against their reference at awkward shapes; see ``triton_cases``."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from outrider.kernels.experts import (
    Mxfp4Matrix,
    Routing,
    SigmoidScores,
    part_of,
    prepare_experts,
    prepare_fp8_experts,
    prepare_mxfp4_experts,
    reference,
    route,
    sum_experts,
)
from outrider.kernels.experts.kernel import TritonExperts
from outrider.kernels.experts.reference import PlainExperts, RoundedExperts, widened_mxfp4
from outrider.kernels.experts.routing import most_tiles
from outrider.kernels.experts.routing import route as route_by_tiles
from outrider.kernels.fp8_linear import FP8, Fp8Matrix, Rounding, quantize_rows
from outrider.kernels.fp8_linear.reference import widened

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter's matrix product of bfloat16 is wrong.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = 4e-3 if INTERPRETED else 2e-2
NUM_TOKENS = [1, 2, 7, 60] if INTERPRETED else [1, 2, 7, 32, 33, 100, 256, 300]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(sum(shape) + seed))


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.isfinite().all()
    assert (found.float() - expected.float()).norm() <= TOLERANCE / 2 * expected.float().norm()


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "normalizes"),
    [
        *((num_tokens, 8, 2, False) for num_tokens in NUM_TOKENS),
        *((num_tokens, *more) for num_tokens in (1, 60) for more in ((5, 5, True), (60, 4, False), (128, 8, True))),
    ],
)
def test_tokens_go_to_their_most_probable_experts(
    num_tokens: int, num_experts: int, num_chosen: int, normalizes: bool
) -> None:
    logits = random(num_tokens, num_experts) * 3
    expected = reference.route(logits, num_chosen, normalizes=normalizes)
    found = route(logits, num_chosen, normalizes=normalizes)
    assert torch.equal(found.expert_ids, expected.expert_ids)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)
    for width in (1, 4, 16):
        check_tiles(route_by_tiles(logits, num_chosen, normalizes=normalizes, width=width), num_experts)


def check_tiles(routing: Routing, num_experts: int) -> None:
    """Every pair lies in one tile of its expert; tiles of an expert are neighbours, and full but for the last."""
    assert routing.tiles is not None
    ids, width, order = routing.expert_ids.flatten().tolist(), routing.tiles.width, routing.tiles.order.tolist()
    used = [tile for tile in routing.tiles.tiles.tolist() if tile[2] > 0]
    assert routing.tiles.tiles.shape[0] == most_tiles(len(ids), num_experts, width) >= len(used)
    pairs = [order[first : first + count] for _, first, count in used]
    assert sorted(pair for tile in pairs for pair in tile) == list(range(len(ids)))
    for (expert, _, count), tile in zip(used, pairs, strict=True):
        assert count <= width
        assert {ids[pair] for pair in tile} == {expert}
    experts = [expert for expert, _, _ in used]
    if routing.expert_ids.shape[1] > 1:
        assert experts == sorted(experts)
    assert len(used) == sum(-(-ids.count(expert) // width) for expert in set(ids))


@pytest.mark.parametrize(("num_groups", "num_groups_chosen", "normalizes"), [(1, 1, True), (4, 2, False), (3, 3, True)])
def test_experts_are_chosen_by_sigmoids_within_groups(
    num_groups: int, num_groups_chosen: int, normalizes: bool
) -> None:
    logits = random(9, 24, seed=1).to(DTYPE)
    scores = SigmoidScores(random(24, seed=2), 2.5, num_groups, num_groups_chosen)
    expected = reference.route(logits, 4, normalizes=normalizes, scores=scores)
    found = route(logits, 4, normalizes=normalizes, scores=scores)
    assert torch.equal(found.expert_ids, expected.expert_ids)
    torch.testing.assert_close(found.weights, expected.weights)


def test_experts_whose_sigmoids_are_all_zero_have_no_weight() -> None:
    scores = SigmoidScores(random(24, seed=2), 2.5, 4, 2)
    logits = torch.full_like(random(3, 24), -200.0)
    expected = reference.route(logits, 4, normalizes=True, scores=scores)
    found = route(logits, 4, normalizes=True, scores=scores)
    assert torch.equal(found.expert_ids, expected.expert_ids)
    assert not found.weights.any() and not expected.weights.any()


def test_logits_that_are_no_numbers_choose_experts_too() -> None:
    """Rows that fill up a graph are such: what is chosen does not matter, but it must be there."""
    logits = random(5, 20)
    logits[1] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    found = route(logits, 4, normalizes=True)
    assert all(len({*ids}) == 4 and max(ids) < 20 for ids in found.expert_ids.T.tolist())
    check_tiles(route_by_tiles(logits, 4, normalizes=True, width=4), 20)
    alone = route(logits[:1].contiguous(), 4, normalizes=True)
    assert torch.equal(found.expert_ids[:, :1], alone.expert_ids)


def test_equally_probable_experts_go_by_number() -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    assert route(logits, 3, normalizes=True).expert_ids.T.tolist() == [[0, 1, 2]] * 3
    in_groups = SigmoidScores(torch.zeros(8, device=DEVICE), 1.0, 4, 2)
    assert route(logits, 3, normalizes=True, scores=in_groups).expert_ids.T.tolist() == [[0, 1, 2]] * 3


def routing_of(num_tokens: int, num_experts: int, num_chosen: int = 2, *, one: bool = False) -> Routing:
    """``one``: all tokens go to the same experts."""
    logits = random(1 if one else num_tokens, num_experts).expand(num_tokens, -1).contiguous()
    return route(logits, num_chosen, normalizes=True)


@pytest.mark.parametrize(("size", "out"), [(128, 64), (72, 40), (200, 136)])
@pytest.mark.parametrize(
    ("num_tokens", "one"), [*((num_tokens, False) for num_tokens in NUM_TOKENS), (1, True), (60, True)]
)
def test_products(num_tokens: int, size: int, out: int, one: bool) -> None:
    num_experts = 6
    weight, bias = random(num_experts * out, size).to(DTYPE), random(num_experts * out).to(DTYPE)
    experts = prepare_experts(weight, num_experts)
    assert isinstance(experts, TritonExperts)
    wide = PlainExperts(weight.float().view(num_experts, out, size))
    routing = routing_of(num_tokens, num_experts, one=one)
    x = random(num_tokens, size, seed=1).to(DTYPE)
    check(experts(x, routing, bias), wide(x.float(), routing, bias.float()))
    pairs = random(2 * num_tokens, size, seed=2).to(DTYPE)
    found = experts(pairs, routing, None, is_weighted=True)
    expected = wide(pairs.float(), routing, None, is_weighted=True)
    assert found.shape == (2, num_tokens, out)
    check(found, expected)
    check(sum_experts(found, DTYPE), expected.sum(0))


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_products_of_two_parts_of_the_experts_add_up(num_tokens: int) -> None:
    """Expert parallelism: weighted products of experts elsewhere are zeros, also where a part has none of a token's."""
    num_experts, size, out = 7, 72, 40
    weight = random(num_experts * out, size).to(DTYPE)
    routing, x = routing_of(num_tokens, num_experts), random(num_tokens, size, seed=1).to(DTYPE)
    whole = prepare_experts(weight, num_experts)(x, routing, None, is_weighted=True)
    total = torch.zeros_like(whole)
    for held in (range(3), range(3, 7)):
        experts = prepare_experts(weight[held.start * out : held.stop * out], len(held))
        total += experts(x, part_of(routing, held), None, is_weighted=True)
    assert torch.equal(total, whole)


ROUNDINGS = {
    "token": Rounding(1 << 20),
    "group": Rounding(128),
    "static": Rounding(None, torch.tensor(0.02, device=DEVICE)),
    "none": Rounding(None),
}


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    ("scale_rows", "num_tokens", "size", "out"),
    [(None, 1, 256, 64), (None, 9, 144, 48), (64, 1, 256, 64), (16, 9, 144, 48)],
)
def test_fp8_products(num_tokens: int, size: int, out: int, scale_rows: int | None, name: str) -> None:
    num_experts, rounding = 4, ROUNDINGS[name]
    rows = num_experts * out
    if scale_rows is None:
        numbers, scales = quantize_rows(random(rows, size))
        matrix = Fp8Matrix(numbers, scales, 1, size)
    else:
        numbers = (random(rows, size) * 64).clamp(-448, 448).to(FP8)
        matrix = Fp8Matrix(numbers, random(-(-rows // scale_rows), -(-size // 128)).abs() / 64 + 0.01, scale_rows, 128)
    experts = prepare_fp8_experts(matrix, rounding, num_experts, DTYPE)
    wide = RoundedExperts(PlainExperts(widened(matrix, torch.float32).view(num_experts, out, size)), rounding)
    routing = routing_of(num_tokens, num_experts)
    for count in (num_tokens, 2 * num_tokens):
        x = random(count, size, seed=1).to(DTYPE)
        check(experts(x, routing, None), wide(x.float(), routing, None))


def test_gates_and_ups_with_scales_of_inputs_of_their_own() -> None:
    num_experts, size, out = 4, 144, 48
    matrix = Fp8Matrix(*quantize_rows(random(num_experts * 2 * out, size)), 1, size)
    scales = torch.tensor([0.02, 0.01, 0.02, 0.02, 0.01, 0.02, 0.03, 0.03], device=DEVICE)
    experts = prepare_fp8_experts(matrix, Rounding(None, scales.repeat_interleave(out)), num_experts, DTYPE)
    wide = widened(matrix, torch.float32).view(num_experts, 2, out, size)
    x, bias, routing = random(9, size, seed=1).to(DTYPE), random(num_experts * 2 * out).to(DTYPE), routing_of(9, 4)
    for is_weighted in (False, True):
        parts = []
        for half in range(2):
            rounding = Rounding(None, scales.view(-1, 2)[:, half])
            part = RoundedExperts(PlainExperts(wide[:, half]), rounding)
            own = bias.float().view(num_experts, 2, out)[:, half].flatten()
            parts.append(part(x.float(), routing, own, is_weighted=is_weighted))
        check(experts(x, routing, bias, is_weighted=is_weighted), torch.cat(parts, -1))


def mxfp4_matrix(rows: int, size: int, scales: tuple[int, int] = (119, 124)) -> Mxfp4Matrix:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    draw = partial(torch.randint, dtype=torch.uint8, device=DEVICE, generator=generator)
    return Mxfp4Matrix(draw(0, 256, (rows, size // 2)), draw(*scales, (rows, size // 32)))


@pytest.mark.parametrize(("size", "out"), [(128, 64), (96, 40), (320, 136)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_mxfp4_products(num_tokens: int, size: int, out: int) -> None:
    num_experts = 4
    matrix, bias = mxfp4_matrix(num_experts * out, size), random(num_experts * out).to(DTYPE)
    experts = prepare_mxfp4_experts(matrix, num_experts, DTYPE)
    assert isinstance(experts, TritonExperts)
    wide = PlainExperts(widened_mxfp4(matrix, torch.float32).view(num_experts, out, size))
    routing = routing_of(num_tokens, num_experts)
    x = random(num_tokens, size, seed=1).to(DTYPE)
    check(experts(x, routing, bias), wide(x.float(), routing, bias.float()))
    pairs = random(2 * num_tokens, size, seed=2).to(DTYPE)
    check(experts(pairs, routing, bias, is_weighted=True), wide(pairs.float(), routing, bias.float(), is_weighted=True))


def test_every_mxfp4_number_is_widened_exactly() -> None:
    """Products with rows of the unit matrix have the bits of the widened weight."""
    size = 64
    matrix = mxfp4_matrix(256, size, (115, 130))
    matrix.numbers[:, 0] = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    x = torch.eye(size, device=DEVICE, dtype=DTYPE)
    routing = route(torch.zeros(size, 1, device=DEVICE), 1, normalizes=True)
    found = prepare_mxfp4_experts(matrix, 1, DTYPE)(x, routing, None)
    assert torch.equal(found.T.float(), widened_mxfp4(matrix, torch.float32))


@pytest.mark.parametrize("form", ["plain", "fp8", "mxfp4"])
def test_a_row_is_the_same_with_any_others(form: str) -> None:
    """Bit for bit, alone and at other places of other tiles."""
    num_experts, size, out = (4, 256, 64) if INTERPRETED else (16, 2048, 256)
    weight = random(num_experts * out, size)
    if form == "mxfp4":
        experts = prepare_mxfp4_experts(mxfp4_matrix(num_experts * out, size), num_experts, DTYPE)
    elif form == "fp8":
        numbers, scales = quantize_rows(weight)
        experts = prepare_fp8_experts(Fp8Matrix(numbers, scales, 1, size), Rounding(size), num_experts, DTYPE)
    else:
        experts = prepare_experts(weight.to(DTYPE), num_experts)
    counts = (1, 2, 9, 40) if INTERPRETED else (*range(1, 301), 512, 1000, 4096)
    x, logits = random(counts[-1], size, seed=1).to(DTYPE), random(counts[-1], num_experts, seed=2)
    whole = outputs(experts, x, logits)
    for count in counts:
        assert torch.equal(outputs(experts, x[-count:], logits[-count:]), whole[-count:]), count


def outputs(experts: object, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    assert isinstance(experts, TritonExperts)
    routing = route(logits, 2, normalizes=True)
    return sum_experts(experts(x, routing, None, is_weighted=True), DTYPE)


def test_a_batch_without_rows() -> None:
    experts = prepare_experts(random(4 * 64, 128).to(DTYPE), 4)
    routing = routing_of(0, 4)
    assert experts(random(0, 128).to(DTYPE), routing, None).shape == (0, 64)


@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_graph_routes_anew_with_each_input() -> None:
    """The number of tiles is that of the tokens, and nothing waits for the host."""
    num_experts, size, out = 32, 512, 256
    weight = random(num_experts * out, size).to(DTYPE)
    experts = prepare_experts(weight, num_experts)
    x, logits = random(50, size).to(DTYPE), random(50, num_experts)

    def compute() -> torch.Tensor:
        routing = route(logits, 4, normalizes=True)
        return sum_experts(experts(x, routing, None, is_weighted=True), DTYPE)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for seed in range(5):
        x.copy_(random(50, size, seed=seed + 10))
        logits.copy_(random(50, num_experts, seed=seed + 20) * (seed + 1))
        poison(captured)
        graph.replay()
        assert torch.equal(captured, compute()), seed
