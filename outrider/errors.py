"""Every error Outrider raises on purpose, as one tree.

::

    OutriderError
    ├── InvalidRequestError      a request's field is wrong; names the field
    ├── ModelNotFoundError       a request names a model that is not served
    ├── ConfigError              a setting is wrong or unknown; names the setting
    ├── ModelError               a model folder cannot be served
    │   ├── NoNativeLayerError     a native family lacks a layer that a configuration asks for
    │   └── NonFiniteLogitsError   a forward gave NaN or infinite logits for one session
    ├── PairMismatchError        a draft that does not fit its target
    ├── CapacityError            no room now; says when to try again
    │   └── OutOfPagesError        the KV pool cannot hold a session
    ├── UnauthenticatedError     the caller's token is missing or not known
    ├── UnavailableError         the other side is not there, or a link to it broke
    │   ├── LoadingError           it is there and still loads its model
    │   ├── StaleReferenceError    the tensor of a reference is not there any more, or never came
    │   ├── TlsError               what both sides expect of TLS does not fit
    │   └── LostTooOftenError      it was lost over one request again and again
    ├── DeadlineError            the caller's time is up
    ├── RequestCancelledError    the caller went away or asked to end it
    ├── ProtocolError            the other side broke the contract
    └── IntegrityError           our own books do not add up (a bug, never the caller's fault)

This module knows no transport: the table from these to gRPC statuses is ``outrider.transport.status``.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base class of all errors that Outrider raises on purpose."""

    field: str = ""
    """The request's, item's or setting's field at fault; empty when there is none."""

    @property
    def problem(self) -> str:
        """The message without the field that it begins with, for an error that names the field otherwise."""
        return str(self).removeprefix(f"{self.field}: ")


class InvalidRequestError(OutriderError):
    """A field of a request is invalid; the message names the valid values."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelNotFoundError(OutriderError):
    """A request names a model that is not served; the message names those that are."""

    field = "model"


class ConfigError(OutriderError):
    """A setting is invalid or unknown; the message names the valid values."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ModelError(OutriderError):
    """A model folder cannot be served: missing, truncated, or of an architecture that is not supported."""


class NoNativeLayerError(ModelError):
    """A configuration asks for what its native family has no layer for; transformers' code may have one."""


class NonFiniteLogitsError(ModelError):
    """A forward gave NaN or infinite logits for one session; other sessions are not affected."""


class PairMismatchError(OutriderError):
    """A draft and a target do not fit together; the message names the difference."""


class CapacityError(OutriderError):
    """Capacity is exhausted at present."""

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class OutOfPagesError(CapacityError):
    """The KV pool currently cannot hold a session of this length."""


class UnauthenticatedError(OutriderError):
    """The caller's token is missing or unknown."""


class UnavailableError(OutriderError):
    """The peer cannot be reached, or the link to it broke."""


class LoadingError(UnavailableError):
    """The peer is loading its model, which is temporary."""


class StaleReferenceError(UnavailableError):
    """The bytes of a plane's reference are not there any more, or never came: the session has to be rebuilt."""


class TlsError(UnavailableError):
    """The TLS requirements of the two sides do not match: a certificate or a setting; the message names it."""


class LostTooOftenError(UnavailableError):
    """A service, or its session, was lost several times in a row over one request; a retry may cause it again."""


class DeadlineError(OutriderError):
    """The caller's deadline has passed."""


class RequestCancelledError(OutriderError):
    """The caller cancelled the request or disconnected."""


class ProtocolError(OutriderError):
    """The peer violated the protocol."""


class IntegrityError(OutriderError):
    """An internal invariant is violated."""


def install_command(extras: str) -> str:
    """Command that installs optional dependencies, for messages. Its name alone would not do: no index has Outrider."""
    return f'pip install -e ".[{extras}]" in a clone of Outrider, or pip install "WHEEL[{extras}]" with its wheel'
