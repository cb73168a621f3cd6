"""The file in shared memory of two processes: its layout, its name, and that a dead owner leaves none behind.

Either process may shorten the file, and access to a mapping beyond its end is a SIGBUS. So it is read and written by
system calls; only a GPU, which copies without the processor, uses a mapping.

Layout: a token, a table of 64-bit entries, then the tensors. Entry n holds the sequence number of the last use of slot
n that its reader is done with, so giving memory back is one write and no message.

The file has a name only until both ends have it open. Its owner holds a lock on it as long as it lives;
making a file removes those without a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path("/dev/shm")
"""Folder of POSIX shared memory on Linux."""
TOKEN_BYTES = 32
TABLE_OFFSET = 64
HEADER_BYTES = 4096
MAX_BYTES = 256 << 20
"""Most memory of one link."""
NUM_SLOTS = (HEADER_BYTES - TABLE_OFFSET) // 8
_PREFIX = "outrider-"
_NAME = re.compile(_PREFIX + r"[0-9a-f]{32}")


def is_available(folder: Path = FOLDER) -> bool:
    """True if this host has shared memory, and this process the right to use it."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def create(folder: Path) -> tuple[str, int]:
    """A new file with a header alone: its name and descriptor; ``OSError`` where there is no room or no right."""
    sweep(folder)
    name, descriptor = _create_locked(folder)
    try:
        grow(descriptor, HEADER_BYTES)
        os.pwrite(descriptor, secrets.token_bytes(TOKEN_BYTES), 0)
    except OSError:
        remove(folder, name)
        os.close(descriptor)
        raise
    return name, descriptor


def _create_locked(folder: Path) -> tuple[str, int]:
    """A new, empty file with a lock. A sweep of another process may find it before it has one, and removes it; then
    there is another.
    """
    while True:
        name = _PREFIX + secrets.token_hex(16)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        os.close(descriptor)


def open_existing(folder: Path, name: str) -> int:
    """The descriptor of another process's file; ``OSError`` if there is none, ``ValueError`` for a foreign name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of ours")
    return os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_token(descriptor: int) -> bytes:
    """Token that only a process with access to this file can read."""
    return os.pread(descriptor, TOKEN_BYTES, 0)


def grow(descriptor: int, num_bytes: int) -> None:
    """Take so much memory now; ``OSError`` when it is not there, rather than a signal when it is written to."""
    os.posix_fallocate(descriptor, 0, num_bytes)


def read_into(descriptor: int, out: NDArray[np.uint8], offset: int) -> bool:
    """Fill an array from the file; False if the file ends before."""
    return os.preadv(descriptor, [out.data], offset) == out.nbytes if out.nbytes else True


def write_from(descriptor: int, content: NDArray[Any], offset: int) -> None:
    """Write a contiguous array to the file; ``OSError`` if there is no memory, as in a file that was shortened."""
    if os.pwrite(descriptor, content.data, offset) != content.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove(folder: Path, name: str) -> None:
    """Take the name away; who has the file open keeps it, and the kernel frees it with the last of them."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()


def sweep(folder: Path) -> None:
    """Remove the files whose owners died before they could."""
    for path in folder.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
