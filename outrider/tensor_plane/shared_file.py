"""The file in shared memory of two processes: its name, and that a dead owner leaves none behind.

Either process may shorten the file, and access to a mapping beyond its end is a SIGBUS. So it is read and written by
system calls; only a GPU, which copies without the processor, uses a mapping.

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
_PREFIX = "outrider-"
_NAME = re.compile(_PREFIX + r"[0-9a-f]{32}")


def create(folder: Path) -> tuple[str, int]:
    """A new, empty file with a lock: its name and descriptor; ``OSError`` where there is no right to make one. A sweep
    of another process may find it before it has the lock, and removes it; then there is another.
    """
    sweep(folder)
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
