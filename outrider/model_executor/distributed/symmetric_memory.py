"""Sums of few rows through memory that the GPUs of one host map of each other: every rank reads all parts itself.

Owns two buffers that all ranks map: one for torch's one-shot all-reduce, one for our kernel that also adds to the
residual stream and normalises. Multicast is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from outrider.kernels.sum_norm import SharedRows, flag_bytes
from outrider.model_executor.distributed.communicator import Norm
from outrider.model_executor.distributed.sharding import Shard

MEASURED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Sizes at which sums are compared; the last is the largest that is taken."""
_ALIGNMENT_BYTES = 16
_TOLERANCE = 0.01
_MAX_ROWS = 32
_MAX_ROW_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """One rank's symmetric memory; the tensors must live as long as any rank may read them."""

    buffer: torch.Tensor  # [any] uint8, for one-shot
    row_buffer: torch.Tensor  # [any] uint8, as ``rows`` lays it out
    rows: SharedRows
    group_name: str

    def takes(self, part: torch.Tensor) -> bool:
        """True if a part fits, and is laid out so."""
        return 0 < part.nbytes <= len(self.buffer) and part.nbytes % _ALIGNMENT_BYTES == 0 and part.is_contiguous()

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        place = self.buffer[: part.nbytes].view(part.dtype).view(part.shape)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, part, "sum", self.group_name)
        return summed

    def add_and_norm(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum of every rank's ``part`` to ``hidden`` in place, and normalise that."""
        from outrider.kernels.sum_norm.kernel import sum_and_norm  # Triton is slow to import

        return sum_and_norm(hidden, part, norm.weight, norm.eps, self.rows)

    def is_right(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if sums are what they should be: of token ids, which are few and float32, and of rows, through both
        halves of their memory. ``RuntimeError`` where the kernel does not take the type.
        """
        part = torch.full((3, 64), float(self.rows.rank + 1), dtype=dtype, device=device)
        total = self.rows.size * (self.rows.size + 1) / 2
        hidden, norm = torch.zeros_like(part), _Plain(torch.ones(64, dtype=dtype, device=device))
        ids = torch.full((4,), float(self.rows.rank + 1), dtype=torch.float32, device=device)
        found = bool((self.all_reduce(part) == total).all())
        found &= bool((self.all_reduce(ids) == total).all())
        for times in (1, 2, 3):
            normed = self.add_and_norm(hidden, part, norm)
            found &= bool((hidden == times * total).all()) and bool(((normed - 1).abs() < _TOLERANCE).all())
        return found


@dataclass(frozen=True, slots=True)
class _Plain:
    """A normalisation to try with."""

    weight: torch.Tensor
    eps: float = 0.0

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.add_(delta), self.weight.shape, self.weight, self.eps)


def open_symmetric_memory(shard: Shard, device: torch.device) -> SymmetricMemory:
    """Every rank at the same point; ``RuntimeError`` where the GPUs cannot map each other's memory."""
    import torch.distributed._symmetric_memory as symmetric

    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("this process is in no group")
    buffer = symmetric.empty(MEASURED_BYTES[-1], dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, world)
    flags = flag_bytes(_MAX_ROWS, shard.size)
    row_buffer = symmetric.empty(flags + 2 * _MAX_ROWS * _MAX_ROW_BYTES, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(row_buffer, world)
    row_buffer.zero_()
    torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))  # no rank raises a flag before all have cleared theirs
    rows = SharedRows(
        addresses=torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device),
        rounds=torch.zeros(_MAX_ROWS, dtype=torch.int32, device=device),
        rank=shard.rank,
        size=shard.size,
        max_rows=_MAX_ROWS,
        max_row_bytes=_MAX_ROW_BYTES,
    )
    return SymmetricMemory(buffer, row_buffer, rows, world.group_name)
