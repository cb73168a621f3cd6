"""Logits that are copied when first written, and no sooner.

The caller's tensor is never changed, and rows that ask for nothing cost nothing. Knows no sampling parameter.

Shape letters: ``N`` rows, ``V`` vocabulary, ``M`` rows chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Workspace:
    """A batch of logits on its way through the processors."""

    def __init__(self, logits: Tensor) -> None:  # [N, V] float32
        self._logits = logits
        self._owned = False

    @property
    def logits(self) -> Tensor:  # [N, V]
        """The logits so far, to read."""
        return self._logits

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._logits.shape[-1]

    def writable(self) -> Tensor:  # [N, V]
        """The logits so far, to change in place."""
        if not self._owned:
            self._logits = self._logits.clone()
            self._owned = True
        return self._logits

    def replace(self, chosen: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
        """Put ``change(rows)`` in the place of the chosen rows; ``change`` may not write to what it is given."""
        if len(chosen) == len(self._logits):
            self._logits, self._owned = change(self._logits), True
            return
        index = self.tensor(chosen)
        self.writable()[index] = change(self._logits[index])

    def tensor(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Plain numbers on the logits' device."""
        return torch.tensor(values, dtype=dtype, device=self._logits.device)

    def column(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:  # [M, 1]
        """One number a row, shaped to broadcast over the vocabulary."""
        return self.tensor(values, dtype).unsqueeze(-1)
