"""What becomes of a number that does not fit its field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from outrider.errors import ProtocolError


@contextlib.contextmanager
def out_of_range_breaks_the_contract() -> Iterator[None]:
    """Turns protobuf's complaint into ``ProtocolError``: on a link there is nobody else to tell."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a value does not fit its field: {error}") from error
