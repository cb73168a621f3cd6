"""Reading of received messages: a oneof by a table of readers, and out-of-range numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outrider.errors import ProtocolError

Readers = dict[str, Callable[[Any], Any]]
"""Name of the field that is set -> its reader."""


def read_one_of(message: Any, group: str, readers: Readers) -> Any:  # noqa: ANN401 - generated types share no base
    """Value of the field that is set in the oneof ``group``; ``ProtocolError`` for an unknown one."""
    chosen = message.WhichOneof(group)
    if chosen not in readers:
        raise ProtocolError(f"{type(message).__name__}.{group}: nothing known is set")
    return readers[chosen](getattr(message, chosen))


@contextlib.contextmanager
def out_of_range_breaks_the_contract() -> Iterator[None]:
    """Turn protobuf's error for a number that does not fit its field into ``ProtocolError``."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a value does not fit its field: {error}") from error
