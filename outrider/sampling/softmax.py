"""Softmax and sums of rows on any device: a row's bits do not depend on its place or on the number of rows.

PyTorch's kernels sum a row from where it is aligned on, and divide a sum among threads by the number of rows.

Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

_ALIGNED_BYTES = 16
"""Alignment of the loads of PyTorch's kernels."""
_WHOLE = 16384
"""Row size below which PyTorch never splits one row among threads of a CPU."""
_PART = 64
"""Numbers of a partial sum; a fixed order of sums makes rows independent of their batch."""


def softmax_rows(logits: Tensor) -> Tensor:  # [N, V] -> [N, V]
    """Probabilities; may be a view of rows that end later."""
    return (aligned_rows(logits) if logits.is_cuda else logits).softmax(-1)[:, : logits.shape[-1]]


def log_softmax_rows(logits: Tensor) -> Tensor:  # [N, V] -> [N, V]
    """Logprobs; may be a view of rows that end later."""
    return (aligned_rows(logits) if logits.is_cuda else logits).log_softmax(-1)[:, : logits.shape[-1]]


def aligned_rows(logits: Tensor) -> Tensor:  # [N, V] -> [N, V or more]
    """The same rows, of which each begins aligned; ends with -inf where that takes a copy."""
    padding = -logits.shape[-1] % (_ALIGNED_BYTES // logits.dtype.itemsize)
    if padding or logits.data_ptr() % _ALIGNED_BYTES:
        return F.pad(logits, (0, padding), value=float("-inf"))
    return logits


def row_sums(values: Tensor) -> Tensor:  # [N, V] -> [N]
    """Sum of each row, always split in the same places."""
    size = values.shape[-1]
    if values.is_cuda:
        return sum_halves(values)
    if size < _WHOLE:
        return values.sum(-1)
    whole = size - size % _PART
    parts = values[:, :whole].reshape(len(values), -1, _PART).sum(-1)
    return row_sums(parts) + values[:, whole:].sum(-1)


def sum_halves(values: Tensor) -> Tensor:  # [N, V] -> [N]
    """Sum of each row: its second half is added to its first, element by element, until one is left."""
    while (size := values.shape[-1]) > 1:
        second = values[:, (size + 1) // 2 :]
        values = values[:, : (size + 1) // 2].clone()
        values[:, : second.shape[-1]] += second
    return values.squeeze(-1)
