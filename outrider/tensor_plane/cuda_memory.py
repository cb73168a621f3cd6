"""Device memory that another process may map: allocations of their own, through CUDA's runtime.

Sharing a torch tensor would export the whole block of torch's allocator that it lies in, other users' tensors included.
Copies are the runtime's own too: torch copies between cards on a stream of the source's, which would give the reader a
context on the writer's card and let the two processes take turns there.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the addresses say which devices they are of."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class ExportedMemory:
    """Bytes of this process on a GPU, for which there is a handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """``RuntimeError`` where there is no room, or CUDA gives no handles."""
        self._device = device
        self._address = ctypes.c_void_p()
        handle = _Handle()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the context
            _check("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
            try:
                _check("cudaIpcGetMemHandle", ctypes.byref(handle), self._address)
            except RuntimeError:
                _runtime().cudaFree(self._address)
                raise
        self.handle = bytes(handle)
        self._copies = _Copies(device)
        self._is_open = True

    def put(self, content: torch.Tensor, offset: int) -> None:
        """Copy ``content`` [N] uint8 to these bytes, in the order of the current stream; nothing once it was freed."""
        if self._is_open:
            self._copies.queue((self._address.value or 0) + offset, content.data_ptr(), content.numel())

    def free(self) -> None:
        """Give the memory back; idempotent."""
        if self._is_open:
            self._is_open = False
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _runtime().cudaFree(self._address)


class ImportedMemory:
    """Bytes of another process on a GPU that this process reaches."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """``RuntimeError`` where the memory cannot be mapped: another host, or GPUs that do not reach each other."""
        self._device = device
        self._address = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)
            _check(
                "cudaIpcOpenMemHandle",
                ctypes.byref(self._address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        self._copies = _Copies(device)
        self._is_open = True

    def take(self, out: torch.Tensor, offset: int) -> None:
        """Copy these bytes to ``out`` [N] uint8, in the order of this device's current stream; ``ConnectionError`` once
        they are unmapped.
        """
        if not self._is_open:
            raise ConnectionError("the plane is closed")
        self._copies.queue(out.data_ptr(), (self._address.value or 0) + offset, out.numel())

    def close(self) -> None:
        """Unmap; idempotent."""
        if self._is_open:
            self._is_open = False
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _runtime().cudaIpcCloseMemHandle(self._address)


class _Copies:
    """Copies in the order of a device's current stream; what a call needs is looked up once."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._memcpy = _runtime().cudaMemcpyAsync
        self._memcpy.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        )  # fmt: skip

    def queue(self, to: int, source: int, num_bytes: int) -> None:
        """``RuntimeError`` where CUDA takes none."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.queue(to, source, num_bytes)
            return
        # Of the raw stream alone: to make the object takes as long as all else here.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        status = self._memcpy(to, source, num_bytes, _ANY_DIRECTION, stream)
        if status:
            _fail("cudaMemcpyAsync", status)


@cache
def _runtime() -> ctypes.CDLL:
    """The very runtime that torch has loaded."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart" in path:
            return ctypes.CDLL(f"/{path}")
    raise RuntimeError("torch has loaded no CUDA runtime")


def _check(name: str, *arguments: object) -> None:
    status = getattr(_runtime(), name)(*arguments)
    if status:
        _fail(name, status)


def _fail(name: str, status: int) -> NoReturn:
    runtime = _runtime()
    runtime.cudaGetLastError()  # or torch would report it at its next call
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(status).decode()}")
