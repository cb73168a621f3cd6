"""Sums along rows that do not depend on how many rows there are. Knows nothing of what is summed."""

from __future__ import annotations

from torch import Tensor

_WHOLE = 16384
"""Below this size torch never splits one row among threads."""
_PART = 64


def row_sums(values: Tensor) -> Tensor:  # [N, V] -> [N]
    """Sums of rows. One long row alone would be cut by thread: cut it here instead, always in the same places."""
    size = values.shape[-1]
    if size < _WHOLE:
        return values.sum(-1)
    whole = size - size % _PART
    parts = values[:, :whole].reshape(len(values), -1, _PART).sum(-1)
    return row_sums(parts) + values[:, whole:].sum(-1)
