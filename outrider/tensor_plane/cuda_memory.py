"""Device memory that another process may map: allocations of their own, through CUDA's runtime.

Sharing a torch tensor would export the whole block of torch's allocator that it lies in, other users' tensors included.
A step's bytes are copied by a kernel, which queues like the forward's own: a copy engine has to be handed the work and
hand it back. Larger copies, and those that are not of whole words, are the runtime's: torch copies between cards on a
stream of the source's, which would give the reader a context on the writer's card and let the two processes take turns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

_log = logging.getLogger(__name__)

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: the addresses say which devices they are of."""
_WORD_BYTES = 8
MOST_KERNEL_BYTES = 16 << 20
"""Copied by a kernel at most: states of a step of many sessions. Parts of a prompt leave the processors to forwards."""


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
        self._bytes = _DeviceBytes(self._address.value or 0, num_bytes, device)
        self._is_open = True

    def put(self, content: torch.Tensor, offset: int) -> None:
        """Copy ``content`` [N] uint8 to these bytes, in the order of the current stream; nothing once it was freed."""
        if self._is_open:
            self._bytes.put(content, offset)

    def free(self) -> None:
        """Give the memory back; idempotent."""
        if self._is_open:
            self._is_open = False
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
        self._bytes = _DeviceBytes(self._address.value or 0, num_bytes, device)
        self._is_open = True
        self._lock = threading.Lock()
        """A kernel that is queued once its memory is unmapped would end this process's use of the GPU."""

    def take(self, out: torch.Tensor, offset: int) -> None:
        """Copy these bytes to ``out`` [N] uint8, in the order of this device's current stream; ``ConnectionError`` once
        they are unmapped.
        """
        with self._lock:
            if not self._is_open:
                raise ConnectionError("the plane is closed")
            self._bytes.take(out, offset)

    def close(self) -> None:
        """Unmap; idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                with torch.cuda.device(self._device):
                    torch.cuda.synchronize()
                    _runtime().cudaIpcCloseMemHandle(self._address)


class _DeviceBytes:
    """Copies to and from bytes that a device reaches, in the order of its current stream; what a call needs is looked
    up once.
    """

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        self._address = address
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._words = _words_at(address, num_bytes, torch.device("cuda", self._index))
        self._memcpy = _runtime().cudaMemcpyAsync
        self._memcpy.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        )  # fmt: skip

    def put(self, content: torch.Tensor, offset: int) -> None:
        """Copy ``content`` [N] uint8 to these bytes; ``RuntimeError`` where CUDA takes no copy."""
        if (words := self._words_of(content, offset)) is not None:
            copy_words(content, words)
        else:
            self._queue(self._address + offset, content.data_ptr(), content.numel())

    def take(self, out: torch.Tensor, offset: int) -> None:
        """Copy these bytes to ``out`` [N] uint8; ``RuntimeError`` where CUDA takes no copy."""
        if (words := self._words_of(out, offset)) is not None:
            copy_words(words, out)
        else:
            self._queue(out.data_ptr(), self._address + offset, out.numel())

    def _words_of(self, other: torch.Tensor, offset: int) -> torch.Tensor | None:  # [N / 8] int64
        """The words that a kernel copies from or to ``other`` [N] uint8; None: it is not for a kernel."""
        num_bytes = other.numel()
        if self._words is None or num_bytes > MOST_KERNEL_BYTES or other.device != self._words.device:
            return None
        if (num_bytes | offset | other.data_ptr()) % _WORD_BYTES:
            return None
        return self._words.narrow(0, offset // _WORD_BYTES, num_bytes // _WORD_BYTES)

    def _queue(self, to: int, source: int, num_bytes: int) -> None:
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self._queue(to, source, num_bytes)
            return
        # Of the raw stream alone: to make the object takes as long as all else here.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        status = self._memcpy(to, source, num_bytes, _ANY_DIRECTION, stream)
        if status:
            _fail("cudaMemcpyAsync", status)


def copy_words(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copy a contiguous tensor to one of as many bytes, a multiple of 8, by a kernel on the current stream.

    ``Tensor.copy_`` would be a ``cudaMemcpyAsync``. Of integers ``conj_physical`` is a plain copy, and reads each word
    once. In inference mode either tensor may be of a forward.
    """
    with torch.inference_mode():
        torch.conj_physical(source.view(torch.int64), out=to.view(torch.int64))


def _words_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor | None:  # [num_bytes / 8] int64
    """The memory as a tensor of the device whose kernels reach it, which may not be the one that it is of; it does not
    own it. None where this torch makes none: all copies are then the runtime's.
    """
    num_words = num_bytes // _WORD_BYTES
    try:
        storage = torch._C._construct_storage_from_data_pointer(address, device, num_words * _WORD_BYTES)
        return torch.empty(0, dtype=torch.int64, device=device).set_(storage, 0, (num_words,), (1,))
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.warning("tensor plane: no kernel can copy here: %s", error)
        return None


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
