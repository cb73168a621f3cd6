"""Copy-on-write logits: the caller's tensor is changed only if it is handed over, and without parameters nothing is
copied.

Shape letters: ``N`` rows, ``V`` vocabulary, ``M`` rows chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Workspace:
    """Logits of a batch while the processors change them."""

    def __init__(self, logits: Tensor, *, is_owned: bool = False) -> None:  # [N, V] float32
        """``is_owned``: the caller needs the tensor no more, which is changed in place."""
        self._logits = logits
        self._owned = is_owned

    @property
    def logits(self) -> Tensor:  # [N, V]
        """Current logits, read-only."""
        return self._logits

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, V."""
        return self._logits.shape[-1]

    def writable(self) -> Tensor:  # [N, V]
        """Current logits, for changes in place."""
        if not self._owned:
            self._logits = self._logits.clone()
            self._owned = True
        return self._logits

    def replace(self, chosen: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
        """Replace the chosen rows by ``change(rows)``; ``change`` must not write to its argument."""
        if len(chosen) == len(self._logits):
            self._logits, self._owned = change(self._logits), True
            return
        index = self.tensor(chosen)
        self.writable()[index] = change(self._logits[index])

    def tensor(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Tensor of plain numbers on the logits' device."""
        return torch.tensor(values, dtype=dtype, device=self._logits.device)

    def column(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:  # [M, 1]
        """Tensor of one number per row, shaped to broadcast over the vocabulary."""
        return self.tensor(values, dtype).unsqueeze(-1)
