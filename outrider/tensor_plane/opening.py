"""Opening the ends of a plane by its kind. What each may raise is ``OPENING_ERRORS``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.planes import PlaneKind
from outrider.tensor_plane.control import Message
from outrider.tensor_plane.endpoints import Details, PlaneLimits, ReaderEnd, WriterEnd

OPENING_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, ArithmeticError, AttributeError, ImportError)
"""A plane that cannot be opened is one that is not used; torch without NCCL has no such attribute."""


def open_writer(
    kind: PlaneKind,
    device: torch.device,
    *,
    host: str,
    limits: PlaneLimits,
    announce: Callable[[Message], None],
) -> WriterEnd:
    """The writing end of one plane, not yet connected."""
    if kind is PlaneKind.CUDA_IPC:
        from outrider.tensor_plane.cuda_ipc import CudaIpcWriter

        return CudaIpcWriter(limits.device_ring_bytes, device)
    if kind is PlaneKind.SHARED_MEMORY:
        from outrider.tensor_plane.shared_memory import SharedMemoryWriter

        return SharedMemoryWriter(limits.ring_bytes, device)
    from outrider.tensor_plane.process_group import ProcessGroupWriter

    ring_bytes = limits.device_ring_bytes if kind is PlaneKind.NCCL else limits.ring_bytes
    return ProcessGroupWriter(kind, ring_bytes, device, host=host, limits=limits, announce=announce)


def open_reader(kind: PlaneKind, details: Details, device: torch.device, *, limits: PlaneLimits) -> ReaderEnd:
    """The reading end of one plane, connected."""
    if kind is PlaneKind.CUDA_IPC:
        from outrider.tensor_plane.cuda_ipc import CudaIpcReader

        return CudaIpcReader(details, device)
    if kind is PlaneKind.SHARED_MEMORY:
        from outrider.tensor_plane.shared_memory import SharedMemoryReader

        return SharedMemoryReader(details, device, max_bytes=limits.ring_bytes)
    from outrider.tensor_plane.process_group import ProcessGroupReader

    return ProcessGroupReader(kind, details, device, limits=limits)
