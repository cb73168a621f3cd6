"""Bounded files: reading of files that were written by others, such as those of a model folder, whatever their size.

A model folder is a download. Its text files are published to users, so a link in it must not name a file of this host.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_SETTINGS_BYTES = 16 << 20
"""Bound on a file of settings; the largest take some 2 MB. Parsing takes ten times its bytes."""
MAX_INDEX_BYTES = 128 << 20
"""Bound on a file that names all tensors; the largest take some 20 MB."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Opening a pipe or a terminal does not block."""


def read_bounded(path: Path, most: int = MAX_SETTINGS_BYTES) -> bytes:
    """The content of a regular file that an operator or the program names; ``OSError`` if it cannot be read or has
    more than ``most`` bytes.
    """
    with os.fdopen(os.open(path, _FLAGS), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        # The size of a file of the kernel, such as those below /proc, is 0.
        size = status.st_size
        content = stream.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def read_of_folder(folder: Path, name: str, most: int = MAX_SETTINGS_BYTES) -> bytes:
    """The content of a file of a model folder; ``OSError`` as ``read_bounded``, and for a link that leads out of it.

    A folder in the cache of the Hugging Face Hub has links to the blobs of its model, which are allowed.
    """
    path = folder / name
    found = path.resolve(strict=True)
    if not _is_of_folder(found, folder.resolve()):
        raise OSError(
            errno.EPERM, f"it is a link to {found}, outside of the model's folder; copy the file into it", str(path)
        )
    return read_bounded(found, most)


def _is_of_folder(found: Path, folder: Path) -> bool:
    """True if a resolved path is below a resolved folder, or below the blobs of its model in the Hub's cache."""
    if found.is_relative_to(folder):
        return True
    return any(
        place.parent.name == "snapshots"
        and place.parents[1].name.startswith("models--")
        and found.is_relative_to(place.parents[1] / "blobs")
        for place in (folder, *folder.parents)
    )
