"""Bounded files: reading of files that were written by others, such as those of a model folder, whatever their size."""

from __future__ import annotations

import errno
from pathlib import Path

MAX_SETTINGS_BYTES = 16 << 20
"""Of a file of settings; the largest take some 2 MB. Parsing takes ten times its bytes."""
MAX_INDEX_BYTES = 128 << 20
"""Of a file that names all tensors; the largest take some 20 MB."""


def read_bounded(path: Path, most: int = MAX_SETTINGS_BYTES) -> bytes:
    """The content of a file; ``OSError`` if it cannot be read or has more than ``most`` bytes."""
    with path.open("rb") as stream:
        # The size of what is no regular file is 0.
        content = stream.read(most + 1) if (size := path.stat().st_size) <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content
