"""Reading of received messages: a oneof by a table of readers, items beyond a limit, numbers out of range.

An item beyond a limit ends only its session, because the message around it is well-formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from outrider import limits, ports
from outrider.errors import InvalidRequestError, ProtocolError

ValueT = TypeVar("ValueT")

Readers = dict[str, Callable[[Any], Any]]
"""Name of the field that is set -> its reader."""


def read_one_of(message: Any, group: str, readers: Readers) -> Any:  # noqa: ANN401 - generated types share no base
    """Value of the field that is set in the oneof ``group``; ``ProtocolError`` for an unknown one."""
    chosen = message.WhichOneof(group)
    if chosen not in readers:
        raise ProtocolError(f"{type(message).__name__}.{group}: nothing known is set")
    return readers[chosen](getattr(message, chosen))


class _OutOfRange:
    """Context of ``out_of_range_breaks_the_contract``: a generator would take several times as long."""

    def __enter__(self) -> None:
        """Nothing is kept."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (TypeError, ValueError, OverflowError)):
            raise ProtocolError(f"a value does not fit its field: {error}") from error


_OUT_OF_RANGE = _OutOfRange()


def out_of_range_breaks_the_contract() -> _OutOfRange:
    """Turn protobuf's error for a number that does not fit its field into ``ProtocolError``."""
    return _OUT_OF_RANGE


def command_within(read: Callable[[Any], ValueT], message: Any) -> ValueT | ports.Rejected:  # noqa: ANN401
    """The command, or a ``Rejected`` in place of one beyond a limit."""
    try:
        return read(message)
    except InvalidRequestError as error:
        return ports.Rejected(message.session, message.generation, error)


def event_within(
    read: Callable[..., ValueT],
    message: Any,  # noqa: ANN401 - generated types share no base
    *rest: Any,  # noqa: ANN401
) -> ValueT | ports.SessionFailed:
    """The event, or the failure of its session if it is beyond a limit."""
    try:
        return read(message, *rest)
    except InvalidRequestError as error:
        return ports.SessionFailed(message.session, message.generation, "ProtocolError", str(error), error.field)


def shortened(text: str) -> str:
    """A text for logs, truncated to its limit."""
    return text[: limits.LINK_TEXT.most]
