"""Communicators over ``torch.distributed``: gloo between CPUs, NCCL between GPUs, and for small sums on one host
symmetric memory where it is there and faster.

Owns the choice, made once by measuring and the same on every rank. Multicast is not used.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from outrider.model_executor.distributed.communicator import Norm
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.distributed.symmetric_memory import MEASURED_BYTES, SymmetricMemory, open_symmetric_memory

_log = logging.getLogger(__name__)

_PAIR = 2
_CALLS = 20
_REPLAYS = 9

OnLost = Callable[[BaseException], None]
"""Called when a collective failed; does not return while it may still come out that a rank is gone."""


class CpuCommunicator:
    """Communicator between processes on CPUs, by gloo; narrow types are summed in float32."""

    def __init__(self, shard: Shard, on_lost: OnLost) -> None:
        self.shard = shard
        self._on_lost = on_lost

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        wide = part if part.dtype.itemsize >= torch.float32.itemsize else part.float()
        try:
            dist.all_reduce(wide)
        except RuntimeError as error:
            self._on_lost(error)
            raise
        return wide.to(part.dtype)

    def add_and_norm(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum of every rank's ``part`` to ``hidden`` in place, and normalise that."""
        return norm.after_adding(hidden, self.all_reduce(part))

    def in_rank_order(self) -> CpuCommunicator:
        """Itself: products on CPUs depend on the number of rows anyway."""
        return self

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part`` [N, C] beside each other."""
        parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        try:
            dist.all_gather(parts, part.contiguous())
        except RuntimeError as error:
            self._on_lost(error)
            raise
        return torch.cat(parts, dim=1)


class GpuCommunicator:
    """Communicator between GPUs: asynchronous, on the current stream, and part of a CUDA graph being captured."""

    def __init__(
        self, shard: Shard, symmetric: SymmetricMemory | None, one_shot_bytes: int, *, is_ordered: bool = False
    ) -> None:
        self.shard = shard
        self._symmetric = symmetric
        self._one_shot_bytes = one_shot_bytes
        self._is_ordered = is_ordered

    def in_rank_order(self) -> GpuCommunicator:
        """Communicator whose sums have one order; that of two ranks has it, as a + b is b + a."""
        return GpuCommunicator(self.shard, self._symmetric, self._one_shot_bytes, is_ordered=self.shard.size > _PAIR)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        if self._is_ordered:
            return sum_in_rank_order(part, self.shard.size)
        if self._symmetric is not None and part.nbytes <= self._one_shot_bytes and self._symmetric.takes(part):
            return self._symmetric.all_reduce(part)
        dist.all_reduce(part)
        return part

    def add_and_norm(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum of every rank's ``part`` to ``hidden`` in place, and normalise that."""
        if self._symmetric is not None and self._one_shot_bytes and self._symmetric.rows.takes(part):
            return self._symmetric.add_and_norm(hidden, part, norm)
        return norm.after_adding(hidden, self.all_reduce(part))

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part`` [N, C] beside each other."""
        parts = part.new_empty(self.shard.size, *part.shape)  # [size, N, C]
        dist.all_gather_into_tensor(parts, part.contiguous())
        return parts.transpose(0, 1).reshape(part.shape[0], -1)


def sum_in_rank_order(part: torch.Tensor, size: int) -> torch.Tensor:
    """Sum of every rank's ``part`` in float32 from rank 0 on, rounded once, as ``sum_norm`` adds up.

    In rings and trees a number's place among all decides in which order its parts meet.
    """
    parts = part.new_empty(size * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous())
    total = torch.zeros_like(part, dtype=torch.float32)
    for own in parts.view(size, *part.shape):
        total += own
    return total.to(part.dtype)


def open_gpu_communicator(
    shard: Shard, device: torch.device, dtype: torch.dtype, *, one_shot: bool = True
) -> GpuCommunicator:
    """Measure, choose, say so; without ``one_shot`` it is NCCL."""
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first call
    is_tried = one_shot and _are_on_one_host()
    symmetric = try_symmetric_memory(shard, device, dtype) if is_tried else None
    if symmetric is None:
        reason = (
            "symmetric memory is not available" if is_tried else "one-shot is off, or the ranks are on several hosts"
        )
        _log.info("all-reduce of %d ranks: NCCL (%s)", shard.size, reason)
        return GpuCommunicator(shard, None, 0)
    limit, said = 0, []
    for num_bytes in MEASURED_BYTES:
        part = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        own, nccl = (_microseconds(work, part) for work in (symmetric.all_reduce, dist.all_reduce))
        said.append(f"{num_bytes >> 10} KiB {own:.1f} / {nccl:.1f} us")
        if not _all_agree(holds=own < nccl):
            break
        limit = num_bytes
    _log.info(
        "all-reduce of %d ranks, one-shot / NCCL: %s; one-shot is used up to %d KiB",
        shard.size,
        ", ".join(said),
        limit >> 10,
    )
    return GpuCommunicator(shard, symmetric, limit)


def try_symmetric_memory(shard: Shard, device: torch.device, dtype: torch.dtype) -> SymmetricMemory | None:
    """None, on all ranks, where the GPUs cannot map each other's memory, or give wrong sums or none of this type."""
    try:
        found = open_symmetric_memory(shard, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        _log.info("no one-shot all-reduce: no symmetric memory: %s", error)
        found = None
    if not _all_agree(holds=found is not None) or found is None:
        return None
    try:
        is_right = found.is_right(device, dtype)
    except RuntimeError as error:  # of a type that torch's kernel does not sum, on every rank alike
        _log.info("no one-shot all-reduce of %s: %s", dtype, error)
        is_right = False
    return found if _all_agree(holds=is_right) else None


def _are_on_one_host() -> bool:
    """True if all ranks see each other's processes."""
    place = zlib.crc32(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}".encode())
    extremes = torch.tensor([place, -place])
    dist.all_reduce(extremes, dist.ReduceOp.MIN)
    return int(extremes[0]) == -int(extremes[1])


def _all_agree(*, holds: bool) -> bool:
    """True if every rank says so; over gloo, so that no device is needed."""
    answer = torch.tensor([int(holds)])
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def _microseconds(work: Callable[[torch.Tensor], object], part: torch.Tensor) -> float:
    """Time of one call, inside a CUDA graph; the median of several replays, since ranks wait for each other."""
    for _ in range(2):
        work(part.clone())
    torch.cuda.synchronize(part.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            work(part)
    found = []
    for _ in range(_REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(part.device)
        found.append(1e3 * float(begin.elapsed_time(end)) / _CALLS)
    return sorted(found)[len(found) // 2]
