"""Secret of a stack's links: a bearer token generated at start, readable only by its processes."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class LinkSecret:
    """File with the token, which appears in no command line or variable."""

    path: str
    """File where the stack's processes read it."""
    descriptors: tuple[int, ...] = ()
    """Open files that they have to inherit for that."""


def make_link_secret() -> LinkSecret:
    """A new token. On Linux the file is in memory; elsewhere in a private folder that is removed at the end."""
    return hold_tokens([secrets.token_urlsafe(_NUM_BYTES)])


def hold_tokens(tokens: Sequence[str]) -> LinkSecret:
    """File with these tokens, one per line, readable only by the stack's processes."""
    text = "".join(f"{token}\n" for token in tokens)
    return _in_memory(text) if hasattr(os, "memfd_create") else _in_folder(text)


def _in_memory(text: str) -> LinkSecret:
    """An anonymous file: no folder has to be writable, and nothing is left when the last process has ended."""
    descriptor = os.memfd_create("outrider-tokens")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    # The number is the same in each process that inherits it.
    return LinkSecret(f"/proc/self/fd/{descriptor}", (descriptor,))


def _in_folder(text: str) -> LinkSecret:
    folder = tempfile.mkdtemp(prefix="outrider-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "tokens")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return LinkSecret(str(path))
