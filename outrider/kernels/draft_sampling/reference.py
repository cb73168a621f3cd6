"""PyTorch reference of ``draft_sampling``; runs on every device, row by row."""

from __future__ import annotations

import torch

from outrider.kernels.draft_sampling.layout import MAX_BANNED, DraftSink, DrawColumn, Method
from outrider.kernels.ordering import largest
from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.streams import MASK, Stream
from outrider.sampling.draws import grouped_argmax, gumbel_argmax, gumbel_argmax_among
from outrider.sampling.support import choose_support

_MASKED = float("-inf")


class ReferenceSampler:
    """See the contract."""

    def __init__(self, *, mass: float, limit: int) -> None:
        self._mass = mass
        self._limit = limit

    def __call__(self, logits: torch.Tensor, parameters: torch.Tensor, sink: DraftSink) -> None:
        """Draw one step from ``logits`` [B, V] by ``parameters`` [B, NUM_COLUMNS] int32."""
        step = int(sink.step)
        for row, numbers in enumerate(parameters.tolist()):
            if numbers[DrawColumn.METHOD] == Method.NONE or numbers[DrawColumn.LENGTH] <= 0:
                sink.next_ids[row] = 0
                continue
            written = sink.records[step, row], sink.supports[step, row]
            sink.next_ids[row] = self._draw(logits[row : row + 1].float(), numbers, written)

    def _draw(
        self,
        logits: torch.Tensor,  # [1, V]
        numbers: list[int],
        written: tuple[torch.Tensor, torch.Tensor],  # [NUM_FIELDS], [2, S]
    ) -> int:
        """The token to feed again."""
        record, support = written
        processed = _process(logits, numbers)
        best, token = processed.max(-1)
        is_finite = bool(logits.isfinite().all())
        record.copy_(torch.tensor([-1, 0, int(is_finite), _bits(best)]))
        if not (is_finite and bool(best.isfinite())):
            return 0
        noise = _noise(numbers, logits.device)
        if numbers[DrawColumn.METHOD] == Method.COUPLED:
            token = gumbel_argmax(processed, noise)
        elif numbers[DrawColumn.METHOD] == Method.GROUPED:
            token = grouped_argmax(processed, noise, _noise(numbers, logits.device, Stream.OUTSIDE_GROUP))
        elif numbers[DrawColumn.METHOD] == Method.CUT_COUPLED:
            probs, ids, _ = choose_support(self._cut(processed, numbers), 1.0, self._limit)
            token = gumbel_argmax_among(probs.log(), ids, noise, logits.shape[-1])
        elif numbers[DrawColumn.METHOD] == Method.SPARSE:
            probs, ids, (width,) = choose_support(self._cut(processed, numbers), self._mass, self._limit)
            token = gumbel_argmax_among(probs.log(), ids, noise, logits.shape[-1])
            support[0, :width] = ids[0, :width].to(torch.int32)
            support[1, :width] = probs[0, :width].view(torch.int32)
            record[1] = width
        record[0] = token[0]
        return int(token[0])

    def _cut(self, processed: torch.Tensor, numbers: list[int]) -> torch.Tensor:  # [1, V] -> [1, V]
        """The probabilities that min-p, top-k and top-p leave, scaled to 1."""
        probs = processed.softmax(-1)
        ordered, ids = largest(probs, min(self._limit, probs.shape[-1]))
        top_k, (min_p, top_p) = numbers[DrawColumn.TOP_K], _floats(numbers[DrawColumn.MIN_P], numbers[DrawColumn.TOP_P])
        kept = ordered >= min_p * ordered[:, :1]
        if 0 < top_k <= ordered.shape[-1]:
            kept &= ordered >= ordered[:, top_k - 1 : top_k]
        sums = ordered.to(torch.float64).cumsum(-1)
        whole = _sum_of(sums, kept) if not kept.all() else 1.0
        if top_p < 1:
            kept &= sums - ordered < top_p * whole
        if kept.all():
            return probs
        left = torch.zeros_like(probs).scatter_(-1, ids, ordered.masked_fill(~kept, 0.0))
        return left / _sum_of(sums, kept)


def _floats(*bits: int) -> list[float]:
    found: list[float] = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()
    return found


def _sum_of(sums: torch.Tensor, kept: torch.Tensor) -> float:  # [1, S] each
    return float(sums.masked_fill(~kept, 0.0).max())


def _process(logits: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    temperature = torch.tensor(numbers[DrawColumn.TEMPERATURE], dtype=torch.int32).view(torch.float32)
    processed = logits / temperature.to(logits.device)
    processed[:, numbers[DrawColumn.NUM_IDS] :] = _MASKED
    banned = zip(
        numbers[DrawColumn.BANNED : DrawColumn.BANNED + MAX_BANNED],
        numbers[DrawColumn.UNTIL : DrawColumn.UNTIL + MAX_BANNED],
        strict=True,
    )
    for token_id, until in list(banned)[: numbers[DrawColumn.NUM_BANNED]]:
        if numbers[DrawColumn.POSITION] < until:
            processed[:, token_id] = _MASKED
    return processed


def _noise(numbers: list[int], device: torch.device, stream: Stream | None = None) -> StreamRows:
    seed = (numbers[DrawColumn.SEED_LOW] & MASK) | ((numbers[DrawColumn.SEED_HIGH] & MASK) << 32)
    bases, positions = [numbers[DrawColumn.BASE]], [numbers[DrawColumn.POSITION]]
    return StreamRows.of([seed], stream or Stream(numbers[DrawColumn.STREAM]), bases, positions, device)


def _bits(value: torch.Tensor) -> int:  # [1] float32
    return int(value.view(torch.int32))
