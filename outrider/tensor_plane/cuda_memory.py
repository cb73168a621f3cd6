"""Device memory that another process may map: allocations of their own, through CUDA's runtime.

Sharing a torch tensor would export the whole block of torch's allocator that it lies in, other users' tensors included.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class _Span:
    """An address as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


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
        self.content: torch.Tensor | None = torch.as_tensor(_Span(self._address.value or 0, num_bytes), device=device)

    def free(self) -> None:
        """Give the memory back; idempotent."""
        if self.content is not None:
            self.content = None
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _runtime().cudaFree(self._address)


class ImportedMemory:
    """Bytes of another process on a GPU that this process reaches."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
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
            self.content: torch.Tensor | None = torch.as_tensor(_Span(self._address.value or 0, num_bytes))

    def close(self) -> None:
        """Unmap; idempotent."""
        if self.content is not None:
            self.content = None
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _runtime().cudaIpcCloseMemHandle(self._address)


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
    runtime = _runtime()
    status = getattr(runtime, name)(*arguments)
    if status:
        runtime.cudaGetLastError()  # or torch would report it at its next call
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(status).decode()}")
