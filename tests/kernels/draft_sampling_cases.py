"""The Triton form of ``draft_sampling`` against its reference, what it must write poisoned first.

Collected and run as ``triton_cases.py`` is.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.kernels.draft_advance import LoopState
from outrider.kernels.draft_advance import kernel as advance_kernel
from outrider.kernels.draft_advance import reference as advance_reference
from outrider.kernels.draft_sampling import DraftSink, kernel
from outrider.kernels.draft_sampling.kernel import TritonSampler
from outrider.kernels.draft_sampling.layout import ALWAYS, NUM_FIELDS, DrawColumn, Field, Method, RowParameters
from outrider.kernels.draft_sampling.reference import ReferenceSampler
from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.streams import Stream
from outrider.sampling.draws import gumbel_argmax, gumbel_argmax_among
from outrider.sampling.logits_processors.process import process_logits
from outrider.sampling.rows import LogitRow
from outrider.sampling.session import SessionSampling
from outrider.types import SamplingParams
from tests.support.core_driver import open_session

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ALL_METHODS = (
    [(1000, 3.0), (2051, 0.5), (2051, 12.0)]
    if INTERPRETED
    else [(size, scale) for size in (1000, 2051, 128_256, 151_936) for scale in (0.5, 3.0, 12.0)]
)
# Sizes that the interpreter is quick with.
SMALL_VOCAB, LIMITS, EQUALS_LIMITS = (
    (250, [1, 7, 128], [3]) if INTERPRETED else (1000, [1, 7, 128, 1000, 1024], [3, 100])
)
POISON = -(2**30) - 7
STREAMS = {
    Method.COUPLED: Stream.COUPLED, Method.CUT_COUPLED: Stream.COUPLED, Method.GROUPED: Stream.OUTSIDE
}  # fmt: skip


def row(method: Method, **changes: object) -> RowParameters:
    plain = RowParameters(
        method=method, temperature=1.0, seed=2**63 + 12345, stream=STREAMS.get(method, Stream.PROPOSAL), base=7,
        position=9, length=4, num_ids=2**30,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def draw(
    logits: torch.Tensor, rows: list[RowParameters], *, kernel: bool, step: int = 0, mass: float, limit: int
) -> DraftSink:
    sampler = (TritonSampler if kernel else ReferenceSampler)(mass=mass, limit=limit)
    count = len(rows)
    sink = DraftSink(
        torch.tensor([step], dtype=torch.int32, device=DEVICE),
        *(
            torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)
            for shape in ((count,), (step + 1, count, NUM_FIELDS), (step + 1, count, 2, limit))
        ),
    )
    parameters = torch.tensor([one.to_numbers() for one in rows], dtype=torch.int32, device=DEVICE)
    sampler(logits, parameters, sink)
    return sink


def compare(logits: torch.Tensor, rows: list[RowParameters], *, step: int = 0, mass: float, limit: int) -> DraftSink:
    """Equal in all but the last bits of probabilities; returns what the kernel wrote."""
    found, truth = (draw(logits, rows, kernel=kernel, step=step, mass=mass, limit=limit) for kernel in (True, False))
    ends_alike = found.records[step, :, Field.WIDTH] == truth.records[step, :, Field.WIDTH]
    for index in (~ends_alike).nonzero().flatten().tolist():
        check_edge(logits[index], rows[index], widths(found)[index], widths(truth)[index], mass=mass)
    torch.testing.assert_close(found.next_ids[ends_alike], truth.next_ids[ends_alike], atol=0, rtol=0)
    records = found.records[step, ends_alike, :3], truth.records[step, ends_alike, :3]
    torch.testing.assert_close(*records, atol=0, rtol=0)
    assert (found.records[:step] == POISON).all()
    largest = found.records[..., Field.LARGEST], truth.records[..., Field.LARGEST]
    finite = truth.records[..., Field.IS_FINITE] == 1
    floats = [bits[finite].view(torch.float32) for bits in largest]
    torch.testing.assert_close(*floats, atol=0, rtol=0)
    for index in ends_alike.nonzero().flatten().tolist():
        compare_supports(found.supports[step, index], truth.supports[step, index], max(widths(truth)[index], 0))
    return found


def check_edge(logits: torch.Tensor, row: RowParameters, *both: int, mass: float) -> None:  # [V]
    """Supports may end apart only where the exact sum before each token between is within 1e-6 of the mass."""
    assert row.method == Method.SPARSE
    assert not row.banned
    probs = (logits.double() / row.temperature).softmax(0).sort(descending=True).values
    before = (probs.cumsum(0) - probs)[min(both) : max(both)]
    torch.testing.assert_close(before, torch.full_like(before, mass), atol=1e-6, rtol=0)


def compare_supports(found: torch.Tensor, truth: torch.Tensor, width: int) -> None:
    """The same tokens with the same probabilities, best first but for the last bits; nothing written beside."""
    assert (found[:, width:] == POISON).all()
    probs = [one[1, :width].contiguous().view(torch.float32) for one in (found, truth)]
    torch.testing.assert_close(*probs, atol=0, rtol=2e-6)
    by_id = [(one[0, :width].sort()) for one in (found, truth)]
    torch.testing.assert_close(by_id[0].values, by_id[1].values, atol=0, rtol=0)
    torch.testing.assert_close(probs[0][by_id[0].indices], probs[1][by_id[1].indices], atol=0, rtol=2e-6)


def widths(sink: DraftSink) -> list[int]:
    found: list[int] = sink.records[-1, :, Field.WIDTH].tolist()
    return found


def peaked(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(DEVICE)


@pytest.mark.parametrize(("vocab_size", "scale"), ALL_METHODS)
def test_all_methods_in_one_batch(vocab_size: int, scale: float) -> None:
    rows = [
        row(Method.GREEDY),
        row(Method.COUPLED, temperature=0.7, seed=5),
        row(Method.SPARSE, temperature=0.7),
        row(Method.NONE),
        row(Method.SPARSE, temperature=1.3, seed=2**64 - 1, base=2**20, position=2**20 + 3),
        row(Method.COUPLED, seed=0, base=0, position=0),
        row(Method.SPARSE, length=0),
        *[row(Method.GROUPED, seed=seed, temperature=0.9, base=3, position=seed) for seed in range(5)],
    ]
    sink = compare(peaked(len(rows), vocab_size, scale), rows, mass=0.999, limit=64)
    assert sink.records[0, 3].tolist() == [POISON] * NUM_FIELDS
    assert sink.next_ids[3] == sink.next_ids[6] == 0
    assert (sink.records[0, [0, 1, 2, 4, 5, 7, 8, 9, 10, 11], Field.TOKEN] >= 0).all()


def test_the_next_step_of_rows_is_the_references() -> None:
    rows = [row(Method.GROUPED, next_base=12, length=3), row(Method.SPARSE), row(Method.GROUPED, next_base=5, length=1)]
    parameters = torch.tensor([one.to_numbers() for one in rows], dtype=torch.int32, device=DEVICE)
    parts = [[0], [9, 9, 9], [4, 5, 6], [10, 10, 10], [0, 2, 4, 6], [3, 1, 4, 1, 5, 9]]
    numbers = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in parts]
    found, truth = (LoopState(*[part.clone() for part in [*numbers[:4], parameters, *numbers[4:]]]) for _ in range(2))
    advance_kernel.advance(found, 8)
    advance_reference.advance(truth, 8)
    for name in LoopState.__slots__:
        torch.testing.assert_close(getattr(found, name), getattr(truth, name), atol=0, rtol=0)
    after = found.parameters[0].tolist()
    assert after[DrawColumn.METHOD] == Method.SPARSE and after[DrawColumn.STREAM] == Stream.PROPOSAL
    assert after[DrawColumn.BASE] == 12 and not after[DrawColumn.NEXT_BASE]


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 20}, {"top_p": 0.5, "min_p": 0.02},
    {"top_p": 0.95, "top_k": 7, "min_p": 0.1}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"top_k": 5000},
    {"top_k": 5000, "top_p": 0.9}, {"top_p": 0.9995},
]  # fmt: skip


@pytest.mark.parametrize(("scale", "limit"), [(0.3, 64), (3.0, 64), (3.0, 256), (12.0, 64)])
@pytest.mark.parametrize("method", [Method.SPARSE, Method.CUT_COUPLED])
def test_cuts_are_the_references(method: Method, scale: float, limit: int) -> None:
    rows = [row(method, seed=seed, temperature=0.7, **cut) for seed, cut in enumerate(CUTS)]
    sink = compare(peaked(len(rows), 1000, scale, seed=3), rows, mass=0.999, limit=limit)
    if method is Method.CUT_COUPLED:
        assert widths(sink) == [0] * len(rows)
        return
    assert widths(sink)[6] == widths(sink)[7] == widths(sink)[8] == 1
    assert widths(sink)[1] <= 20


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_what_is_drawn_does_not_depend_on_how_many_candidates_are_few(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(Method.SPARSE, seed=seed, temperature=0.7, **cut) for seed, cut in enumerate(CUTS)]
    logits, sinks = peaked(len(rows), 1000, scale, seed=4), []
    for few in (16, 64, 256):
        monkeypatch.setattr(kernel, "FEW", few)
        sinks.append(draw(logits, rows, kernel=True, mass=0.999, limit=64))
    for other in sinks[1:]:
        assert torch.equal(other.records, sinks[0].records)
        assert torch.equal(other.supports, sinks[0].supports)
        assert torch.equal(other.next_ids, sinks[0].next_ids)


def test_what_equals_the_last_of_the_top_k_stays() -> None:
    logits = peaked(2, 1000, 1.0)
    logits[:, [3, 500, 900]], logits[:, 700] = 20.0, 21.0
    sink = compare(logits, [row(Method.SPARSE, top_k=2), row(Method.SPARSE, top_k=4)], mass=0.999, limit=64)
    assert sink.supports[0, :, 0, :4].tolist() == [[700, 3, 500, 900]] * 2
    assert widths(sink) == [4, 4]


def test_cuts_are_those_of_the_processing_of_logits() -> None:
    """The kernel's supports against the mask that the plain way makes of the same request, and cut coupled rows' tokens
    against a race under that mask.
    """
    cuts = [cut for cut in CUTS if cut.get("top_k", 0) <= SMALL_VOCAB]
    logits = peaked(len(cuts), SMALL_VOCAB, 3.0, seed=4)
    sparse = draw(logits, [row(Method.SPARSE, **cut) for cut in cuts], kernel=True, mass=1 - 1e-6, limit=SMALL_VOCAB)
    coupled = draw(
        logits, [row(Method.CUT_COUPLED, **cut) for cut in cuts], kernel=True, mass=1 - 1e-6, limit=SMALL_VOCAB
    )
    for index, cut in enumerate(cuts):
        opened = open_session(
            0, prompt_length=1, max_length=9, num_token_ids=SMALL_VOCAB, sampling=SamplingParams(**cut)
        )
        left = process_logits(logits[index : index + 1].cpu(), [LogitRow(SessionSampling(opened), [0], 1, 1)])
        expected = left[0].isfinite().nonzero().flatten().tolist()
        found = sparse.supports[0, index, 0, : widths(sparse)[index]].tolist()
        missing = left[0].softmax(0)[sorted(set(expected) - set(found))].sum()
        assert set(found) <= set(expected)
        assert missing < 1e-5
        assert coupled.next_ids[index] == gumbel_argmax(left, noise_of(row(Method.CUT_COUPLED)))[0]


@pytest.mark.parametrize("kernel", [True, False])
def test_a_token_is_drawn_again_from_what_is_reported(kernel: bool) -> None:
    """Evidence is what was drawn from; scaled even this little, the tokens would differ."""
    cuts = CUTS if kernel and INTERPRETED else CUTS * 2
    rows = [row(Method.SPARSE, seed=seed, temperature=0.8, **cut) for seed, cut in enumerate(cuts)]
    sink = draw(peaked(len(rows), SMALL_VOCAB, 1.5, seed=9), rows, kernel=kernel, mass=0.98, limit=64)
    again, others = [], []
    for index, width in enumerate(widths(sink)):
        ids, bits = sink.supports[0, index, :, :width].cpu()
        probs, noise = bits.contiguous().view(torch.float32), noise_of(rows[index])
        assert probs.double().sum().item() == pytest.approx(1, abs=1e-6)
        again.append(int(gumbel_argmax_among(probs.log()[None], ids.long()[None], noise, SMALL_VOCAB)[0]))
        others.append(int(gumbel_argmax_among(0.3 * probs.log()[None], ids.long()[None], noise, SMALL_VOCAB)[0]))
    assert sink.next_ids.tolist() == again
    assert again != others


def noise_of(one: RowParameters) -> StreamRows:
    return StreamRows.of([one.seed], one.stream, [one.base], [one.position], torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_of_short_types_go_by_lowest_id(dtype: torch.dtype) -> None:
    logits = peaked(4, 1000, 2.0).to(dtype)
    rows = [row(Method.GREEDY), row(Method.COUPLED), row(Method.SPARSE), row(Method.SPARSE, seed=3, temperature=0.6)]
    compare(logits, rows, mass=0.99, limit=64 if INTERPRETED else 300)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_support_ends_at_its_limit(limit: int) -> None:
    logits = peaked(3, SMALL_VOCAB, 0.2)
    sink = compare(logits, [row(Method.SPARSE, seed=seed) for seed in range(3)], mass=0.999, limit=limit)
    assert widths(sink) == [limit] * 3 if limit < 900 else all(900 < width <= 1000 for width in widths(sink))
    for index, width in enumerate(widths(sink)):
        probs = sink.supports[0, index, 1, :width].contiguous().view(torch.float32)
        assert probs.sum().item() == pytest.approx(1)
        assert (sink.supports[0, index, :, width:] == POISON).all()


def test_a_certain_token_is_a_support_of_one() -> None:
    logits = peaked(2, 1000, 1.0)
    logits[:, 600] = 40.0
    sink = compare(logits, [row(Method.SPARSE), row(Method.SPARSE, temperature=1e-30)], mass=0.999, limit=64)
    assert widths(sink) == [1, 1]
    assert sink.next_ids.tolist() == [600, 600]


@pytest.mark.parametrize("limit", EQUALS_LIMITS)
def test_many_equals_beyond_the_capacity(limit: int) -> None:
    """All alike; two values; and a few above many equals: the lowest ids get in."""
    logits = torch.zeros(3, 2051, device=DEVICE)
    logits[1, 1500:] = 0.001
    logits[2, 2000:2002] = 1.0
    sink = compare(logits, [row(Method.SPARSE, seed=seed) for seed in range(3)], mass=0.999, limit=limit)
    assert widths(sink) == [limit] * 3
    assert sink.supports[0, 0, 0].tolist() == list(range(limit))
    assert sink.supports[0, 1, 0].tolist() == list(range(1500, 1500 + limit))
    assert sink.supports[0, 2, 0].tolist() == [2000, 2001, *range(limit - 2)]


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.9999])
def test_any_mass(mass: float) -> None:
    rows = [row(Method.SPARSE), row(Method.SPARSE, temperature=0.4)]
    compare(peaked(2, SMALL_VOCAB, 3.0), rows, mass=mass, limit=SMALL_VOCAB)


@pytest.mark.parametrize("mass", [0.999999, 1.0])
def test_of_masses_within_rounding_of_all_only_the_tail_may_differ(mass: float) -> None:
    logits, rows = peaked(2, SMALL_VOCAB, 3.0), [row(Method.SPARSE), row(Method.SPARSE, temperature=0.4)]
    found, truth = (draw(logits, rows, kernel=kernel, mass=mass, limit=SMALL_VOCAB) for kernel in (True, False))
    for index, both in enumerate(zip(widths(found), widths(truth), strict=True)):
        width = min(both)
        torch.testing.assert_close(found.supports[0, index, 0, :width], truth.supports[0, index, 0, :width])
        longer = found if both[0] > both[1] else truth
        tail = longer.supports[0, index, 1, width : max(both)].contiguous().view(torch.float32)
        assert tail.sum().item() < 4e-6


def test_banned_tokens_and_padded_vocabularies_are_never_drawn() -> None:
    logits = peaked(3, 1000, 1.0)
    logits[:, 5], logits[:, 990] = 30.0, 40.0
    banned = ((5, 12), (990, ALWAYS), (3, ALWAYS))
    methods = (Method.GREEDY, Method.COUPLED, Method.SPARSE)
    for step in (0, 3):
        rows = [row(m, banned=banned, position=9 + step) for m in methods]
        found = compare(logits, rows, step=step, mass=0.999, limit=64)
        assert [token == 5 for token in found.next_ids.tolist()] == [step == 3] * 3
    found = compare(logits, [row(m, num_ids=990) for m in methods], mass=0.999, limit=64)
    assert found.next_ids.tolist() == [5] * 3


def test_a_row_that_cannot_be_drawn_from_hurts_no_other() -> None:
    logits = peaked(8, 1000, 1.0)
    logits[1, 999] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 400] = float("-inf")
    logits[6] *= 1e10  # divided by next to nothing it overflows
    rows = [row(Method.SPARSE, seed=seed) for seed in range(8)]
    rows[4] = row(Method.SPARSE, num_ids=1, banned=((0, ALWAYS),))
    rows[5] = row(Method.GREEDY, num_ids=1, banned=((0, ALWAYS),))
    rows[6] = row(Method.COUPLED, temperature=1e-30)
    sink = compare(logits, rows, mass=0.999, limit=64)
    assert [token >= 0 for token in sink.records[0, :, Field.TOKEN].tolist()] == [True, *[False] * 6, True]
    assert sink.records[0, :, Field.IS_FINITE].tolist() == [1, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
def test_many_draws_are_the_references() -> None:
    methods = [Method.SPARSE, Method.COUPLED, Method.GREEDY, Method.SPARSE]
    for seed in range(20):
        logits = peaked(32, 128_256, 1.5 + seed % 4, seed)
        rows = [row(methods[i % 4], seed=1000 * seed + i, temperature=0.7 + 0.1 * (i % 5)) for i in range(32)]
        compare(logits, rows, mass=0.999, limit=1024)
