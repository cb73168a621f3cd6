"""Cases of draft sampling: one step of a draft loop, in every way in which its tokens are drawn.

The floor is to read the logits once. On a CPU, where there are no kernels, the time is that of the reference. The gate
compares with the reference on the CPU, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace
from outrider.kernels.draft_sampling import DraftSampler, DraftSink, make_sampler
from outrider.kernels.draft_sampling.layout import NUM_FIELDS, Field, Method, RowParameters
from outrider.kernels.draft_sampling.reference import ReferenceSampler
from outrider.model_executor.draft_loop import DraftingRules
from outrider.randomness.streams import Stream

_TOP_P, _TOP_P_AND_K = {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
_WAYS: dict[str, tuple[Method, dict[str, Any]]] = {
    "greedy": (Method.GREEDY, {}),
    "coupled": (Method.COUPLED, {}),
    "coupled, top-p": (Method.CUT_COUPLED, _TOP_P),
    "rejection": (Method.SPARSE, {}),
    "rejection, top-p": (Method.SPARSE, _TOP_P),
    "rejection, top-p and top-k": (Method.SPARSE, _TOP_P_AND_K),
}
_RULES = DraftingRules()
_NUM_CHECKED = 4
"""Rows; the reference is slow."""
_AT_THE_EDGE = 2
"""Tokens that may be in one support and not in the other, where rounding decides."""
_NUM_SETS = 4


def drafting_cases(place: KernelPlace, *, num_rows: int) -> Iterator[KernelCase]:
    """A case for each way of drawing one token of ``num_rows`` sessions."""
    vocab_size = 128_256 if place.is_large else 2048
    logits = [3 * place.random(num_rows, vocab_size) for _ in range(_NUM_SETS if place.is_large else 1)]
    for name, (method, changes) in _WAYS.items():
        plain = [_parameters(method, seed, vocab_size) for seed in range(num_rows)]
        numbers = [replace(row, **changes).to_numbers() for row in plain]
        yield _case(place, name, logits, torch.tensor(numbers, dtype=torch.int32, device=place.device))


def _parameters(method: Method, seed: int, vocab_size: int) -> RowParameters:
    stream = Stream.COUPLED if method in {Method.COUPLED, Method.CUT_COUPLED} else Stream.PROPOSAL
    return RowParameters(method, 0.7, seed, stream, base=0, position=100, length=1, num_ids=vocab_size)


def _case(place: KernelPlace, name: str, logits: list[torch.Tensor], parameters: torch.Tensor) -> KernelCase:
    rows, vocab_size = logits[0].shape
    sampler = make_sampler(place.device, mass=_RULES.support_mass, limit=_RULES.support_limit)
    sink = _sink(rows, place.device)

    def difference() -> float:
        few = logits[0][:_NUM_CHECKED], parameters[:_NUM_CHECKED]
        truth = _drawn(ReferenceSampler(mass=_RULES.support_mass, limit=_RULES.support_limit), *(x.cpu() for x in few))
        found = _drawn(sampler, *few)
        return sum(not _agree(*pair) for pair in zip(found, truth, strict=True)) / len(truth)

    return KernelCase(
        f"draft sampling {name}",
        f"{rows} x {vocab_size}",
        rows * vocab_size * logits[0].element_size(),
        lambda i: sampler(logits[i % len(logits)], parameters, sink),
        difference,
        0.0,
        is_capturable=place.is_large,
    )


def _sink(rows: int, device: torch.device) -> DraftSink:
    shapes = ((rows,), (1, rows, NUM_FIELDS), (1, rows, 2, _RULES.support_limit))
    next_ids, records, supports = (torch.full(shape, -1, dtype=torch.int32, device=device) for shape in shapes)
    return DraftSink(torch.zeros(1, dtype=torch.int32, device=device), next_ids, records, supports)


def _drawn(sampler: DraftSampler, logits: torch.Tensor, parameters: torch.Tensor) -> list[tuple[int, set[int]]]:
    """Each row's token and support."""
    sink = _sink(len(logits), logits.device)
    sampler(logits, parameters, sink)
    records, ids = sink.records[0].tolist(), sink.supports[0, :, 0].tolist()
    return [(record[Field.TOKEN], set(own[: record[Field.WIDTH]])) for record, own in zip(records, ids, strict=True)]


def _agree(found: tuple[int, set[int]], truth: tuple[int, set[int]]) -> bool:
    return found[0] == truth[0] and len(found[1] ^ truth[1]) <= _AT_THE_EDGE
