"""The writing end of shared memory: a service's, which owns the file and what of it is in use.

Owns where each array lies. Memory is used again as soon as its reader is done with it; where none is free, or the host
has no more, the answer is None and the array travels inline. Used on one event loop.
"""

from __future__ import annotations

import hmac
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.tensor_plane import shared_file
from outrider.types import FloatArray
from outrider.v1.tensor_pb2 import SharedMemoryRegion

_log = logging.getLogger(__name__)

MIN_TENSOR_BYTES = 64 << 10
"""Smaller arrays travel inline as fast."""
_ALIGNMENT = 4096
GROWTH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Use:
    """A run of bytes that a reader may still look at."""

    begin: int
    end: int
    slot: int
    sequence: int


class SharedWriter:
    """Arrays into memory that the other end reads, once it has shown that it does."""

    def __init__(self, *, folder: Path = shared_file.FOLDER, max_bytes: int = shared_file.MAX_BYTES) -> None:
        """Shared memory of the writer; where no file can be made, ``name`` is empty and every array travels inline."""
        self.name = ""
        """Name of the file, as long as the other end has not answered."""
        self.is_confirmed = False
        self._folder = folder
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._num_bytes = 0
        """Memory that the file has taken; 0 without a file."""
        self._uses: list[_Use] = []  # by place
        self._free_slots = list(range(shared_file.NUM_SLOTS))
        self.num_written = 0
        """Tensors that went through the file so far."""
        try:
            self.name, self._descriptor = shared_file.create(folder)
            self._num_bytes = shared_file.HEADER_BYTES
        except OSError as error:
            _log.info("no shared memory for tensors: %s", error)

    def confirm(self, token: bytes) -> None:
        """The other end's answer: the file's token, or something else when it could not read it."""
        if self._num_bytes and self.name:
            self.is_confirmed = hmac.compare_digest(token, shared_file.read_token(self._descriptor))
            self._forget_name()

    def place(self, values: FloatArray) -> SharedMemoryRegion | None:
        """Copy an array to where the other end can read it; None when it has to travel inline."""
        if not self.is_confirmed or values.nbytes < MIN_TENSOR_BYTES:
            return None
        self._collect()
        found = self._find_room(values.nbytes)
        if found is None or not self._free_slots or not self._write(values, found):
            return None
        self.num_written += 1
        use = _Use(found, found + values.nbytes, self._free_slots.pop(), self.num_written)
        self._uses.append(use)
        self._uses.sort(key=lambda use: use.begin)
        return SharedMemoryRegion(
            offset_bytes=use.begin, length_bytes=values.nbytes, slot=use.slot, sequence=use.sequence
        )

    @property
    def num_in_use(self) -> int:
        """Arrays whose reader is not done."""
        self._collect()
        return len(self._uses)

    def close(self) -> None:
        """Let go of the file; the reader keeps what it holds."""
        self.is_confirmed = False
        if self._num_bytes:
            self._forget_name()
            self._num_bytes = 0
            os.close(self._descriptor)

    def _forget_name(self) -> None:
        shared_file.remove(self._folder, self.name)
        self.name = ""

    def _collect(self) -> None:
        """Take back what the reader is done with."""
        if not self._uses or not self._num_bytes:
            return
        table = np.zeros(shared_file.NUM_SLOTS, "<u8")
        shared_file.read_into(self._descriptor, table.view(np.uint8), shared_file.TABLE_OFFSET)
        done = [use for use in self._uses if table[use.slot] == use.sequence]
        if done:
            self._free_slots += [use.slot for use in done]
            self._uses = [use for use in self._uses if table[use.slot] != use.sequence]

    def _find_room(self, num_bytes: int) -> int | None:
        """The lowest gap that is wide enough: what was used before is in the caches."""
        begin = shared_file.HEADER_BYTES
        for use in self._uses:
            if begin + num_bytes <= use.begin:
                return begin
            begin = -(-use.end // _ALIGNMENT) * _ALIGNMENT
        return begin if begin + num_bytes <= self._max_bytes else None

    def _write(self, values: FloatArray, offset: int) -> bool:
        """Write values, in a file that grows in steps; False when the host has no more memory."""
        end = offset + values.nbytes
        try:
            if end > self._num_bytes:
                num_bytes = min(-(-end // GROWTH_BYTES) * GROWTH_BYTES, self._max_bytes)
                shared_file.grow(self._descriptor, num_bytes)
                self._num_bytes = num_bytes
            shared_file.write_from(self._descriptor, np.ascontiguousarray(values, "<f4"), offset)
        except OSError as error:
            _log.warning("no more shared memory for tensors, which travel inline now: %s", error)
            return False
        return True
