"""Reading a oneof by a table of readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.errors import ProtocolError

Readers = dict[str, Callable[[Any], Any]]
"""By the name of the field that is set."""


def read_one_of(message: Any, group: str, readers: Readers) -> Any:  # noqa: ANN401 - generated types share no base
    """Read whichever field of the oneof ``group`` is set; ``ProtocolError`` when it is none of those known."""
    chosen = message.WhichOneof(group)
    if chosen not in readers:
        raise ProtocolError(f"{type(message).__name__}.{group}: nothing known is set")
    return readers[chosen](getattr(message, chosen))
