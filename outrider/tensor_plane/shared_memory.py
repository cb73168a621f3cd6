"""POSIX shared memory as a plane: a file without a name that both processes have open.

The file has a name only until the reader has opened it; a writer that died before that leaves one that the next writer
removes (``shared_file``). On a GPU the file is mapped and page-locked, so that copies are asynchronous, and only the
GPU uses the mapping. Elsewhere the file is read and written: a peer that shortened it would end this process with
SIGBUS otherwise.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from outrider.tensor_plane import shared_file
from outrider.tensor_plane.endpoints import Details, ReaderEnd, WriterEnd

_log = logging.getLogger(__name__)

_MIN_BYTES = 1 << 20
"""Smallest ring; with less shared memory the plane is not used."""


class _File:
    """The ring's bytes in a file; the descriptor is this object's."""

    def __init__(self, descriptor: int, capacity: int, device: torch.device) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        """Lock that is held while the descriptor is used, since another file gets its number once it is closed."""
        self._is_open = True
        self._locked = _page_locked(descriptor, capacity) if device.type == "cuda" else None  # [R]

    def write(self, content: torch.Tensor, offset: int) -> None:
        """Copy ``content`` [N] to the ring; nothing once it is closed."""
        if self._locked is not None:
            self._locked[offset : offset + content.numel()].copy_(content, non_blocking=True)
            return
        values = content.cpu().contiguous().numpy()
        with self._lock:
            if self._is_open:
                shared_file.write_from(self._descriptor, values, offset)

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy from the ring to ``out`` [N]; ``ConnectionError`` if the ring is closed or its file too short."""
        if self._locked is not None:
            out.copy_(self._locked[offset : offset + out.numel()], non_blocking=True)
            return
        is_direct = out.device.type == "cpu" and out.is_contiguous()
        values = out if is_direct else torch.empty(out.numel(), dtype=torch.uint8)
        with self._lock:
            if not self._is_open or not shared_file.read_into(self._descriptor, values.numpy(), offset):
                raise ConnectionError("the plane is closed, or its file was shortened")
        if not is_direct:
            out.copy_(values)

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            if self._locked is not None:
                torch.cuda.synchronize()
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostUnregister(self._locked.data_ptr())
                self._locked = None  # unmapped with the last reference
            os.close(self._descriptor)


def _page_locked(descriptor: int, capacity: int) -> torch.Tensor | None:
    """The ring mapped for a GPU, [R]; None where the mapping cannot be page-locked."""
    try:
        ring = torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(ring.data_ptr(), ring.numel(), 0))
    except (RuntimeError, ValueError, OSError) as error:
        _log.info("copies to and from shared memory are not asynchronous: %s", error)
        return None
    return ring


class SharedMemoryWriter(WriterEnd):
    """The end that owns the file."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Take up to ``capacity`` bytes, less where the host has less to give; ``OSError`` where it has nearly none."""
        self._device = device
        self._name, descriptor = shared_file.create(shared_file.FOLDER)
        try:
            self.capacity = _grow(descriptor, capacity)
        except OSError:
            shared_file.remove(shared_file.FOLDER, self._name)
            os.close(descriptor)
            raise
        self._file = _File(descriptor, self.capacity, device)

    def details(self) -> Details:
        """The file's name."""
        return {"name": self._name}

    def opened(self) -> None:
        """The reader has the file, or never will: it needs no name any more."""
        shared_file.remove(shared_file.FOLDER, self._name)

    def write(self, content: torch.Tensor, offset: int, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Copy; on a GPU in the order of the stream."""
        self._file.write(content, offset)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Let go of the file; the kernel frees it with the last that has it open."""
        shared_file.remove(shared_file.FOLDER, self._name)
        self._file.close()


class SharedMemoryReader(ReaderEnd):
    """The end that opened the writer's file."""

    def __init__(self, details: Details, device: torch.device, *, max_bytes: int) -> None:
        """``OSError`` or ``ValueError`` where the file is not there, as on another host. What the file has beyond a
        ring of ``max_bytes`` is not used.
        """
        descriptor = shared_file.open_existing(shared_file.FOLDER, str(details["name"]))
        self.capacity = min(os.fstat(descriptor).st_size, max_bytes)
        self._file = _File(descriptor, self.capacity, device)

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy; on a GPU in the order of the stream."""
        self._file.read(out, offset)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _grow(descriptor: int, capacity: int) -> int:
    """Take ``capacity`` bytes, or half as long as there is too little; ``OSError`` when that gets too small."""
    while True:
        try:
            shared_file.grow(descriptor, capacity)
        except OSError:
            if capacity // 2 < _MIN_BYTES:
                raise
            capacity //= 2
        else:
            return capacity
