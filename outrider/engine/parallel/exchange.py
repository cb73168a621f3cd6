"""Sums and joins over ``torch.distributed``: gloo between CPUs, NCCL between GPUs, and for small sums on one host the
one-shot all-reduce over symmetric memory where it is there and faster.

Owns the choice, made once by measuring and the same on every rank. Multicast is not used. Refuses to know what is
summed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from outrider.engine.parallel.sharding import Shard

_log = logging.getLogger(__name__)

_MEASURED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
_ALIGNMENT_BYTES = 16
_CALLS = 20
_REPLAYS = 9

OnLost = Callable[[BaseException], None]
"""Called when a collective failed; does not return while it may still come out that a rank is gone."""


class CpuExchange:
    """Between processes on CPUs, by gloo; narrow types are summed in float32."""

    def __init__(self, shard: Shard, on_lost: OnLost) -> None:
        self.shard = shard
        self._on_lost = on_lost

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        wide = part if part.dtype.itemsize >= torch.float32.itemsize else part.float()
        try:
            dist.all_reduce(wide)
        except RuntimeError as error:
            self._on_lost(error)
            raise
        return wide.to(part.dtype)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part`` [N, C] beside each other."""
        parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        try:
            dist.all_gather(parts, part.contiguous())
        except RuntimeError as error:
            self._on_lost(error)
            raise
        return torch.cat(parts, dim=1)


class GpuExchange:
    """Between GPUs: asynchronous, on the current stream, and part of a CUDA graph that is being captured."""

    def __init__(self, shard: Shard, one_shot: OneShot | None) -> None:
        self.shard = shard
        self._one_shot = one_shot

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        if self._one_shot is not None and self._one_shot.takes(part):
            return self._one_shot.sum(part)
        dist.all_reduce(part)
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part`` [N, C] beside each other."""
        parts = part.new_empty(self.shard.size, *part.shape)  # [size, N, C]
        dist.all_gather_into_tensor(parts, part.contiguous())
        return parts.transpose(0, 1).reshape(part.shape[0], -1)


@dataclass(frozen=True, slots=True)
class OneShot:
    """Each rank reads all ranks' parts from their memory and sums them itself, in the order of ranks."""

    buffer: torch.Tensor  # [max_bytes] uint8, mapped by all ranks
    group_name: str
    max_bytes: int

    def takes(self, part: torch.Tensor) -> bool:
        """Whether a part is small enough, and laid out so."""
        return 0 < part.nbytes <= self.max_bytes and part.nbytes % _ALIGNMENT_BYTES == 0 and part.is_contiguous()

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``."""
        place = self.buffer[: part.nbytes].view(part.dtype).view(part.shape)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, part, "sum", self.group_name)
        return summed


def open_gpu_exchange(shard: Shard, device: torch.device, dtype: torch.dtype) -> GpuExchange:
    """Measure, choose, say so."""
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first call
    widest = _open_one_shot(device)
    if not _all_agree(widest is not None):
        _log.info("sums of %d ranks: NCCL (symmetric memory is not available)", shard.size)
        return GpuExchange(shard, None)
    if widest is None:
        raise RuntimeError("all ranks agreed on something that is not here")
    limit, said = 0, []
    for num_bytes in _MEASURED_BYTES:
        part = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        own, nccl = (_microseconds(work, part) for work in (widest.sum, dist.all_reduce))
        said.append(f"{num_bytes >> 10} KiB {own:.1f} / {nccl:.1f} us")
        if not _all_agree(own < nccl):
            break
        limit = num_bytes
    _log.info(
        "sums of %d ranks, one-shot / NCCL: %s; one-shot is used up to %d KiB", shard.size, ", ".join(said), limit >> 10
    )
    return GpuExchange(shard, OneShot(widest.buffer, widest.group_name, limit) if limit else None)


def _open_one_shot(device: torch.device) -> OneShot | None:
    """None where the GPUs cannot map each other's memory, or give wrong sums."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        world = dist.group.WORLD
        if world is None:
            return None
        buffer = symmetric.empty(_MEASURED_BYTES[-1], dtype=torch.uint8, device=device)
        symmetric.rendezvous(buffer, world)
        one_shot = OneShot(buffer, world.group_name, _MEASURED_BYTES[-1])
        probe = torch.full((64,), float(dist.get_rank() + 1), device=device)
        expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        is_right = bool((one_shot.sum(probe) == expected).all())
    except (RuntimeError, ImportError, AttributeError) as error:
        _log.debug("no symmetric memory: %s", error)
        return None
    return one_shot if is_right else None


def _all_agree(holds: bool) -> bool:
    """Whether every rank says so; over gloo, so that no device is needed."""
    answer = torch.tensor([int(holds)])
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def _microseconds(work: Callable[[torch.Tensor], object], part: torch.Tensor) -> float:
    """Of one call, inside a CUDA graph; the least of several replays, since ranks wait for each other."""
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
