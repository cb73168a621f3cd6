"""Exit after an ``OutriderError``: one line on standard error and exit code 1, without a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from outrider.errors import OutriderError

ERROR_PREFIX = "error: "
"""Start of the line, by which a parent process finds the reason."""


@contextlib.contextmanager
def exit_cleanly() -> Iterator[None]:
    """Wrap a ``__main__``: an ``OutriderError`` becomes a line and exit code 1, an interrupt becomes exit code 130.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except OutriderError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
