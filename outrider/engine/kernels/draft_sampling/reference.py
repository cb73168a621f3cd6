"""The truth of ``draft_sampling`` in PyTorch; runs on every device, row by row."""

from __future__ import annotations

import torch

from outrider.engine.kernels.draft_sampling.layout import MAX_BANNED, Column, DraftSink, Method
from outrider.engine.sampling.draws import race, race_among
from outrider.engine.sampling.support import choose_support
from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.streams import MASK, Stream

_MASKED = float("-inf")


class ReferenceSampler:
    """See the contract."""

    def __init__(self, *, mass: float, limit: int) -> None:
        self._mass = mass
        self._limit = limit

    def __call__(self, logits: torch.Tensor, parameters: torch.Tensor, step: int, sink: DraftSink) -> None:
        """Draw step ``step`` from ``logits`` [B, V] by ``parameters`` [B, NUM_COLUMNS] int32."""
        next_ids, records, supports = sink.of_step(step)
        for row, numbers in enumerate(parameters.tolist()):
            if numbers[Column.METHOD] == Method.NONE or step >= numbers[Column.LENGTH]:
                next_ids[row] = 0
                continue
            next_ids[row] = self._draw(logits[row : row + 1].float(), numbers, step, (records[row], supports[row]))

    def _draw(
        self,
        logits: torch.Tensor,  # [1, V]
        numbers: list[int],
        step: int,
        written: tuple[torch.Tensor, torch.Tensor],  # [NUM_FIELDS], [2, S]
    ) -> int:
        """The token to feed again."""
        record, support = written
        processed = _process(logits, numbers, step)
        largest, token = processed.max(-1)
        is_finite = bool(logits.isfinite().all())
        record.copy_(torch.tensor([-1, 0, int(is_finite), _bits(largest)]))
        if not (is_finite and bool(largest.isfinite())):
            return 0
        noise = _noise(numbers, step, logits.device)
        if numbers[Column.METHOD] == Method.COUPLED:
            token = race(processed, noise)
        elif numbers[Column.METHOD] == Method.SPARSE:
            probs, ids, (width,) = choose_support(processed.softmax(-1), self._mass, self._limit)
            token = race_among(probs.log(), ids, noise, logits.shape[-1])
            support[0, :width] = ids[0, :width].to(torch.int32)
            support[1, :width] = probs[0, :width].view(torch.int32)
            record[1] = width
        record[0] = token[0]
        return int(token[0])


def _process(logits: torch.Tensor, numbers: list[int], step: int) -> torch.Tensor:
    temperature = torch.tensor(numbers[Column.TEMPERATURE], dtype=torch.int32).view(torch.float32)
    processed = logits / temperature.to(logits.device)
    processed[:, numbers[Column.NUM_IDS] :] = _MASKED
    banned = zip(
        numbers[Column.BANNED : Column.BANNED + MAX_BANNED],
        numbers[Column.UNTIL : Column.UNTIL + MAX_BANNED],
        strict=True,
    )
    for token_id, until in list(banned)[: numbers[Column.NUM_BANNED]]:
        if numbers[Column.POSITION] + step < until:
            processed[:, token_id] = _MASKED
    return processed


def _noise(numbers: list[int], step: int, device: torch.device) -> StreamRows:
    seed = (numbers[Column.SEED_LOW] & MASK) | ((numbers[Column.SEED_HIGH] & MASK) << 32)
    position = numbers[Column.POSITION] + step
    return StreamRows.of([seed], Stream(numbers[Column.STREAM]), [numbers[Column.BASE]], [position], device)


def _bits(value: torch.Tensor) -> int:  # [1] float32
    return int(value.view(torch.int32))
