"""CUDA IPC as a plane: the reader maps the writer's ring and copies out of it, on one card or between two.

A copy into the ring is in the order of the writer's stream. A reference is given out when what follows on that stream
has been awaited (the target's scores), so the bytes are there when the reader hears of them, without an event between
processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.tensor_plane.cuda_memory import ExportedMemory, ImportedMemory
from outrider.tensor_plane.endpoints import Details, ReaderEnd, WriterEnd


class CudaIpcWriter(WriterEnd):
    """The end that owns the memory."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """``RuntimeError`` where there is no room, or CUDA gives no handles."""
        self.capacity = capacity
        self._device = device
        self._memory = ExportedMemory(capacity, device)

    def details(self) -> Details:
        """The handle."""
        return {"handle": self._memory.handle.hex(), "capacity": self.capacity}

    def write(self, content: torch.Tensor, offset: int, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Copy, in the order of the stream."""
        self._memory.put(content, offset)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Free the ring."""
        self._memory.free()


class CudaIpcReader(ReaderEnd):
    """The end that maps the memory."""

    widest_gap_bytes = 1 << 20

    def __init__(self, details: Details, device: torch.device) -> None:
        """``RuntimeError`` where it cannot be mapped."""
        self.capacity = int(details["capacity"])
        self._memory = ImportedMemory(bytes.fromhex(str(details["handle"])), device)

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy, in the order of the stream."""
        self._memory.take(out, offset)

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
