"""Device lock: a file lock by which services of one device keep their captures and measurements apart.

Captures share the lock; a measurement holds it alone. Services in different containers have no common folder for
temporary files, so they do not see each other's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""Seconds to wait for the lock: another model's capture takes up to about half a minute."""
_POLL_S = 0.02
"""Seconds between two attempts to take the lock."""


@contextlib.contextmanager
def device_lock(device_id: str, *, is_shared: bool = False, patience_s: float = _PATIENCE_S) -> Iterator[bool]:
    """Hold the lock of a device, together with other sharers if ``is_shared``; yields whether it was taken.

    ``device_id`` is that of a ``ModelDescription``, empty for a CPU.
    Nothing is raised where it cannot be taken in time: what it keeps apart then overlaps.
    """
    path = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}-{device_id or 'cpu'}.lock"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning("the device lock %s cannot be opened: %s", path, error)
        yield False
        return
    try:
        is_taken = _take(handle, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX, patience_s)
        if not is_taken:
            _log.warning("the device lock %s was not free for %g s", path, patience_s)
        yield is_taken
    finally:
        os.close(handle)  # releases the lock


def _take(handle: int, kind: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
