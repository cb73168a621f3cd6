"""Cases of recurrent layers: the gated delta rule over a step's tokens and over a prompt, in chunks and token by token.

Sizes are a 27B hybrid's on a GPU and tiny on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace, relative_error
from outrider.kernels.gated_delta import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights, gated_delta, reference

_LOG = 64
"""Tokens that a slot's log holds."""
_REPLAYED = 6
"""Tokens between the state of a row and the tokens of its step: those that a step replays by default, and two."""


def recurrence_cases(place: KernelPlace, *, num_rows: int, tokens_per_row: int) -> Iterator[KernelCase]:
    """A step of ``num_rows`` sequences with some tokens each, and one prompt in both forms."""
    shape = DeltaShape(48, 16, 128, 128, 4) if place.is_large else DeltaShape(4, 2, 8, 8, 4)
    length, prompt = 256, 2000 if place.is_large else 150
    kept = length - tokens_per_row
    step = _rows(place, [tokens_per_row] * num_rows, length, kept - _REPLAYED, kept - _REPLAYED, in_chunks=False)
    yield _case(place, shape, "gated delta", f"{num_rows} rows of {tokens_per_row} tokens", step)
    for name, in_chunks in (("in chunks", True), ("one by one", False)):
        rows = _rows(place, [prompt], prompt, 0, prompt - 4, in_chunks=in_chunks)
        yield _case(place, shape, f"gated delta, {name}", f"a prompt of {prompt} tokens", rows)


def _rows(place: KernelPlace, counts: list[int], length: int, start: int, end: int, *, in_chunks: bool) -> DeltaRows:
    """Rows of sequences of one length, whose states are moved from ``start`` to ``end``."""
    query_starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    num_rows = len(counts)
    columns = query_starts, [length] * num_rows, [0] * query_starts[-1], list(range(num_rows)), *(
        [position] * num_rows for position in (start, end)
    )  # fmt: skip
    tensors = (torch.tensor(column, dtype=torch.int32, device=place.device) for column in columns)
    return DeltaRows(*tensors, in_chunks=in_chunks)


def _case(place: KernelPlace, shape: DeltaShape, name: str, size: str, rows: DeltaRows) -> KernelCase:
    """States and logs of noise; the step leaves each state where it is, a prompt begins with none."""
    device, num_rows = place.device, len(rows.slots)
    states = torch.randn(num_rows, shape.num_heads, shape.key_dim, shape.value_dim, device=device)
    slots = DeltaSlots(states, place.random(num_rows, _LOG, shape.num_inputs))
    weights = DeltaWeights(
        torch.randn(shape.num_channels, shape.num_taps, device=device),
        -torch.rand(shape.num_heads, device=device), torch.randn(shape.num_heads, device=device),
    )  # fmt: skip
    inputs = place.random(len(rows.token_slots), shape.num_inputs)

    def difference() -> float:
        expected = reference.gated_delta(inputs, DeltaSlots(*(part.clone() for part in slots)), rows, weights, shape)
        return relative_error(gated_delta(inputs, slots, rows, weights, shape), expected)

    return KernelCase(
        name, size, states.nbytes + inputs.nbytes + 4 * len(inputs) * shape.num_heads * shape.value_dim,
        lambda _: gated_delta(inputs, slots, rows, weights, shape), difference, 2e-3, is_capturable=place.is_large,
    )  # fmt: skip
