"""The reading end of shared memory: a coordinator's, which copies arrays out of it and says when it is done.

The file is read and never mapped: a service that shortened it would end this process with SIGBUS. The copy cannot
change while it is used, and its memory is given back at once.
"""

from __future__ import annotations

import contextlib
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
        """Token that shows the owner that its file is seen."""
        self._descriptor = descriptor
        self._num_bytes_left = shared_file.MAX_BYTES
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, name: str, *, folder: Path = shared_file.FOLDER) -> SharedReader | None:
        """The file of that name; None when it is not there, or not to be read: on another host, say."""
        try:
            return cls(shared_file.open_existing(folder, name))
        except (OSError, ValueError):
            return None

    def begin_message(self) -> None:
        """The next regions are of another message. Those of one message have at most ``MAX_BYTES`` together."""
        self._num_bytes_left = shared_file.MAX_BYTES

    def fetch(self, region: SharedMemoryRegion) -> NDArray[np.uint8]:
        """A copy of the bytes of a region, whose memory is given back.

        ``ProtocolError`` for a region that is not in the file, or of more bytes than a message may have.
        """
        begin, length = region.offset_bytes, region.length_bytes
        self._num_bytes_left -= length
        if begin < shared_file.HEADER_BYTES or region.slot >= shared_file.NUM_SLOTS or self._num_bytes_left < 0:
            raise ProtocolError(f"shared memory: {length} bytes at {begin}, slot {region.slot}, are not of a file")
        content = np.empty(length, np.uint8)
        if not shared_file.read_into(self._descriptor, content, begin):
            raise ProtocolError(f"shared memory: {length} bytes at {begin} are beyond the end of the file")
        self._give_back(region.slot, region.sequence)
        return content

    def _give_back(self, slot: int, sequence: int) -> None:
        with contextlib.suppress(OSError):  # the owner has shortened the file, and there is no memory to extend it
            os.pwrite(self._descriptor, sequence.to_bytes(8, "little"), shared_file.TABLE_OFFSET + 8 * slot)
