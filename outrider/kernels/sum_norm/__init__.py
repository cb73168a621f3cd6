"""The sum of what several GPUs have, added to the residual stream and normalised: one pass where there were three.

Contract: every rank calls ``sum_and_norm`` at the same point with its ``part`` [T, N]; ``x`` [T, N], which is the same
on all, becomes x + the sum of all parts, and the normalised sum is returned. Sums are in float32 in the order of ranks,
so all ranks get the same bits. Each rank reads the others' parts from their memory. What it must be is ``rms_norm``
after adding an all-reduced part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SharedRows", "flag_bytes"]

_ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Memory through which ranks show each other rows, in turn in one of two halves.

    A rank that has seen a row's flags of one round knows that all others have read what the round before showed, so the
    half of the round before that may be written again.
    """

    addresses: torch.Tensor  # [size] int64: each rank's buffer, its flags [max_rows, size] int32 first, then two halves
    rounds: torch.Tensor  # [max_rows] int32: how often this rank has shown each row
    rank: int
    size: int
    max_rows: int
    max_row_bytes: int

    def takes(self, rows: torch.Tensor) -> bool:
        """True if [T, N] rows fit."""
        is_small = 0 < rows.shape[0] <= self.max_rows and rows.shape[1] * rows.dtype.itemsize <= self.max_row_bytes
        return is_small and rows.is_contiguous()


def flag_bytes(max_rows: int, size: int) -> int:
    """Bytes before the first half, which is aligned for wide reads."""
    return -(-4 * max_rows * size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
