"""POSIX shared memory as a plane: a file without a name that both processes map.

The file has a name only until the reader has opened it; a writer that died before that leaves one that the next writer
removes (``shared_file``). On a GPU the mapping is page-locked, so that copies are asynchronous.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from outrider.tensor_plane import shared_file
from outrider.tensor_plane.endpoints import Details, ReaderEnd, WriterEnd

_log = logging.getLogger(__name__)

_MIN_BYTES = 1 << 20


class _Mapping:
    """The ring's bytes in a file; the descriptor is this object's."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._descriptor = descriptor
        self._is_locked = False
        mapped = torch.frombuffer(shared_file.map_all(descriptor), dtype=torch.uint8)
        self.ring: torch.Tensor | None = mapped[shared_file.HEADER_BYTES :]  # [R]
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # then copies are not asynchronous
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(runtime.cudaHostRegister(self.ring.data_ptr(), self.ring.numel(), 0))
                self._is_locked = True

    def close(self) -> None:
        if self.ring is None:
            return
        if self._is_locked:
            torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.ring.data_ptr())
        self.ring = None  # unmapped with the last reference
        os.close(self._descriptor)


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
        self._mapping = _Mapping(descriptor, device)

    def details(self) -> Details:
        """The file's name."""
        return {"name": self._name}

    def opened(self) -> None:
        """The reader has the file, or never will: it needs no name any more."""
        shared_file.remove(shared_file.FOLDER, self._name)

    def write(self, content: torch.Tensor, offset: int, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Copy; on a GPU in the order of the stream."""
        ring = self._mapping.ring
        if ring is not None:
            ring[offset : offset + content.numel()].copy_(content, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Let go of the file; the kernel frees it with its last mapping."""
        shared_file.remove(shared_file.FOLDER, self._name)
        self._mapping.close()


class SharedMemoryReader(ReaderEnd):
    """The end that opened the writer's file."""

    def __init__(self, details: Details, device: torch.device) -> None:
        """``OSError`` or ``ValueError`` where the file is not there, as on another host."""
        self._device = device
        self._mapping = _Mapping(shared_file.open_existing(shared_file.FOLDER, str(details["name"])), device)
        self.capacity = 0 if self._mapping.ring is None else self._mapping.ring.numel()

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy; on a GPU in the order of the stream."""
        ring = self._mapping.ring
        if ring is None:
            raise ConnectionError("the plane is closed")
        out.copy_(ring[offset : offset + out.numel()], non_blocking=True)

    def close(self) -> None:
        """Let go of the file."""
        self._mapping.close()


def _grow(descriptor: int, capacity: int) -> int:
    """Take so many bytes, or half as long as there is too little; ``OSError`` when that gets too small."""
    while True:
        try:
            shared_file.grow(descriptor, shared_file.HEADER_BYTES + capacity)
        except OSError:
            if capacity // 2 < _MIN_BYTES:
                raise
            capacity //= 2
        else:
            return capacity
