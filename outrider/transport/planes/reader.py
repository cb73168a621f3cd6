"""The reading end of shared memory: a coordinator's, which looks at arrays where they lie and says when it is done."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.tensor_plane import shared_file
from outrider.v1.tensor_pb2 import SharedMemoryRegion


class SharedReader:
    """Arrays out of memory that the other end writes."""

    def __init__(self, descriptor: int) -> None:
        self.token = shared_file.read_token(descriptor)
        """What shows the owner that its file is seen."""
        self._descriptor = descriptor
        self._map = shared_file.map_all(descriptor)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, name: str, *, folder: Path = shared_file.FOLDER) -> SharedReader | None:
        """The file of that name; None when it is not there, or not to be read: on another host, say."""
        try:
            return cls(shared_file.open_existing(folder, name))
        except (OSError, ValueError):
            return None

    def fetch(self, region: SharedMemoryRegion) -> NDArray[np.uint8]:
        """The bytes of a region, without a copy; given back when nothing refers to them any more.

        ``ProtocolError`` for a region that is not in the file.
        """
        begin, length = region.offset_bytes, region.length_bytes
        if begin + length > len(self._map):
            self._map = shared_file.map_all(self._descriptor)
        if begin < shared_file.HEADER_BYTES or begin + length > len(self._map) or region.slot >= shared_file.NUM_SLOTS:
            raise ProtocolError(f"shared memory: {length} bytes at {begin} are not in a file of {len(self._map)}")
        content = np.frombuffer(self._map, np.uint8, length, begin)
        weakref.finalize(content, _give_back, self._map, region.slot, region.sequence).atexit = False
        return content


def _give_back(mapped: mmap.mmap, slot: int, sequence: int) -> None:
    np.frombuffer(mapped, "<u8", shared_file.NUM_SLOTS, shared_file.TABLE_OFFSET)[slot] = sequence
