"""Security files: read when needed, with detection of changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.errors import ConfigError

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Stamp of each file, which changes when the file is rewritten or replaced; None for a missing one."""


def read(setting: str, path: str) -> bytes:
    """Read the file; ``ConfigError`` names the setting and the file."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(setting, f"{path} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise ConfigError(setting, f"{path} is empty")
    return content


def stamp(paths: Iterable[str | None]) -> Stamp:
    """Value that differs if the file has changed."""
    return tuple(_stamp(Path(path)) for path in paths if path is not None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino
