"""From a service's ``SessionFailed`` to the error it names."""

from __future__ import annotations

from outrider import errors
from outrider.errors import ConfigError, InvalidRequestError, OutriderError, ProtocolError
from outrider.ports import SessionFailed


def as_error(event: SessionFailed) -> OutriderError:
    """The error of ``outrider.errors`` that the event names; ``ProtocolError`` for an unknown name."""
    found = getattr(errors, event.code, None)
    if not (isinstance(found, type) and issubclass(found, OutriderError)):
        return ProtocolError(f"a session failed with the unknown code {event.code!r}: {event.message}")
    if issubclass(found, InvalidRequestError | ConfigError):
        # Its message already begins with the field.
        return found(event.field, event.message.removeprefix(f"{event.field}: "))
    return found(event.message)
