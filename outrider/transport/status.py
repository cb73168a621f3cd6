"""Table of errors and gRPC statuses, in both directions.

Every status has ``google.rpc.ErrorInfo`` (domain "outrider", the reason is the error's class), an invalid field also
``google.rpc.BadRequest``, and a lack of room ``google.rpc.RetryInfo``. Reading a status gives the same error; a status
of another origin becomes the nearest error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider import errors
from outrider.errors import OutriderError
from outrider.transport.security import OPEN_CLIENT, ClientSecurity
from outrider.transport.security.explaining import explain

DOMAIN = "outrider"
_DEFAULT_RETRY_MS = 1000
"""Retry hint of a status without one."""
_MAX_MESSAGE_CHARACTERS = 500
"""Characters: a status travels in headers, of which a peer takes 8 KiB in all, and says its message three times."""

CODES: dict[type[OutriderError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoNativeLayerError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NonFiniteLogitsError: grpc.StatusCode.INTERNAL,
    errors.PairMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfPagesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.LoadingError: grpc.StatusCode.UNAVAILABLE,
    errors.StaleReferenceError: grpc.StatusCode.UNAVAILABLE,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.TlsError: grpc.StatusCode.UNAVAILABLE,
    errors.LostTooOftenError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelledError: grpc.StatusCode.CANCELLED,
    errors.ProtocolError: grpc.StatusCode.INTERNAL,
    errors.IntegrityError: grpc.StatusCode.INTERNAL,
    OutriderError: grpc.StatusCode.INTERNAL,
}
"""Status codes by class; a subclass that is not named has its parent's."""

_BY_NAME = {kind.__name__: kind for kind in CODES}
_NEAREST: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.CANCELLED: errors.RequestCancelledError,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ConfigError,
}
"""Error class for a status that is not ours."""
_LONGEST_RETRY_MS = 60_000
"""A longer delay of a server counts as this."""
_NOT_HTTP2 = ("http1.x server", "Expected SETTINGS frame as the first frame")
"""Texts of gRPC for a server whose first bytes are none of HTTP/2."""


def to_status(error: OutriderError) -> status_pb2.Status:
    """The status for an error."""
    kind = next(kind for kind in type(error).__mro__ if kind in CODES)
    message = _shortened(str(error))
    status = status_pb2.Status(code=CODES[kind].value[0], message=message)
    _attach(status, error_details_pb2.ErrorInfo(reason=kind.__name__, domain=DOMAIN, metadata=_metadata(error)))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_shortened(error.field), description=message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.CapacityError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_rpc_error(error: grpc.RpcError, address: str, security: ClientSecurity = OPEN_CLIENT) -> OutriderError:
    """The error of a failed call to ``address``; ``security`` is that of the call."""
    ours = _our_error(error)
    if ours is not None:
        return ours
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        trouble = explain(details, address, security.tls_for(address))
        if trouble is not None:
            return errors.TlsError(trouble)
    return _from_foreign(error.code(), details, address)


@contextlib.contextmanager
def translating_errors(address: str, security: ClientSecurity = OPEN_CLIENT) -> Iterator[None]:
    """Raise an ``OutriderError`` for gRPC errors inside the block."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, address, security) from error


def make_error(name: str, message: str, field: str = "", retry_after_ms: int = _DEFAULT_RETRY_MS) -> OutriderError:
    """An error by the name of its class; an unknown name gives an ``OutriderError``."""
    kind = _BY_NAME.get(name, OutriderError)
    if issubclass(kind, errors.CapacityError):
        return kind(message, retry_after_ms=retry_after_ms)
    # The message holds the field already, where the class would put it in front.
    made = kind.__new__(kind, message)
    Exception.__init__(made, message)
    made.field = field
    return made


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else f"{message[: _MAX_MESSAGE_CHARACTERS - 3]}..."


def _attach(status: status_pb2.Status, detail: object) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)  # type: ignore[arg-type]
    status.details.append(packed)


def _metadata(error: OutriderError) -> dict[str, str]:
    return {"field": error.field} if error.field else {}


def _our_error(error: grpc.RpcError) -> OutriderError | None:
    try:
        status = rpc_status.from_call(error)
        return None if status is None else _from_status(status)
    except (ValueError, DecodeError):  # details that contradict their status, or cannot be read, are not ours
        return None


def _from_status(status: status_pb2.Status) -> OutriderError | None:
    info, field, retry_after_ms = error_details_pb2.ErrorInfo(), "", _DEFAULT_RETRY_MS
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_ms = max(0, min(retry.retry_delay.ToMilliseconds(), _LONGEST_RETRY_MS))
        else:
            detail.Unpack(info)
    if info.domain != DOMAIN:
        return None
    return make_error(info.reason, status.message, field, retry_after_ms)


def _from_foreign(code: grpc.StatusCode, details: str, address: str) -> OutriderError:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.InvalidRequestError("request", f"is larger than {address} takes: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.CapacityError(f"{address} has no room: {details}")
    if any(words in details for words in _NOT_HTTP2):
        problem = f"{address} does not speak gRPC: is it the port of HTTP? That of gRPC is 50050 by default"
        return errors.UnavailableError(problem) if code is grpc.StatusCode.UNAVAILABLE else OutriderError(problem)
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.UnavailableError(f"{address} cannot be reached: {details}")
    if _is_broken_stream(code, details):
        return errors.UnavailableError(f"the connection to {address} broke: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidRequestError("request", details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineError(f"{address} did not answer in time")
    kind = _NEAREST.get(code, OutriderError)
    return make_error(kind.__name__, f"{address} answered {code.name}: {details}")


def _is_broken_stream(code: grpc.StatusCode, details: str) -> bool:
    """GRPC and proxies tell of some connections that broke within a stream by other codes than UNAVAILABLE."""
    if code is grpc.StatusCode.INTERNAL:
        return "RST_STREAM" in details
    return code is grpc.StatusCode.UNKNOWN and "Stream removed" in details
