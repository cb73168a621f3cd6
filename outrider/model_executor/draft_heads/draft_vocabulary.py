"""Draft vocabulary: the tokens that a head's last product gives logits of, which may be fewer than the target's.

``d2t`` of a checkpoint holds, for each id of the draft's, what is to be added to it to get the target's.

Shape letters: ``N`` rows, ``V`` vocabulary, ``U`` draft vocabulary.
"""

from __future__ import annotations

import torch

from outrider.errors import ModelError
from outrider.model_executor.layers.contract import Weights, WeightTarget

_NOT_DRAFTED = -1e30
"""The logit of a token that the draft vocabulary lacks: finite, as sampling wants it, and never drawn."""


class DraftVocabulary:
    """The ids of one head. Of a head over the whole vocabulary it does nothing."""

    def __init__(self, size: int, vocab_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self._vocab_size, self._dtype, self._device = size, vocab_size, dtype, device
        self._target_ids = torch.arange(size, device=device)  # [U] the target's id of each

    @property
    def is_reduced(self) -> bool:
        """True if the target has more tokens."""
        return self.size != self._vocab_size

    def has_use_for(self, name: str) -> bool:
        """True if a tensor of a checkpoint is needed: ``t2d`` says what ``d2t`` says too, and SafeAILab saves both of a
        whole vocabulary, where they are passed over.
        """
        return name != "t2d" and (name != "d2t" or self.is_reduced)

    def weights(self) -> Weights:
        """``d2t``: offsets, to which the draft's own ids are added once they are there."""
        if self.is_reduced:
            yield "d2t", WeightTarget(self._target_ids, (self.size,), file_types=("I64", "I32"))

    def finish_loading(self) -> None:
        """``d2t`` is there; ``ModelError`` for one of another target."""
        if not self.is_reduced:
            return
        self._target_ids += torch.arange(self.size, device=self._device)
        self._check(self._target_ids.tolist())

    def _check(self, target_ids: list[int]) -> None:
        rows: dict[int, int] = {}
        for row, target_id in enumerate(target_ids):
            if not 0 <= target_id < self._vocab_size:
                raise ModelError(
                    f"d2t leads row {row} to id {target_id}; ids of the target are from 0 to {self._vocab_size - 1}"
                )
            if (first := rows.setdefault(target_id, row)) != row:
                raise ModelError(f"d2t leads rows {first} and {row} both to id {target_id}; each should have its own")

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows, V] logits of nothing, for ``logits`` to write to; None where it needs no such memory."""
        if not self.is_reduced:
            return None
        dtype = torch.float32 if self._dtype == torch.float16 else self._dtype  # which has no number as low
        return torch.full((num_rows, self._vocab_size), _NOT_DRAFTED, dtype=dtype, device=self._device)

    def logits(self, drafted: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, U] of the draft's ids to logits [N, V] of the target's; ``out`` is part of what ``empty_logits`` gave."""
        drafted = drafted[:, : self.size]
        if not self.is_reduced:
            return drafted
        if out is None:
            out = self.empty_logits(drafted.shape[0])
        assert out is not None  # noqa: S101 - the vocabulary is reduced
        return out.index_copy_(1, self._target_ids, drafted.to(out.dtype))
