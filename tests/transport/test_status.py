"""The table between errors and statuses, both ways, for the whole tree."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc.aio import AioRpcError, Metadata

from outrider import errors
from outrider.errors import CapacityError, InvalidRequestError, OutriderError
from outrider.transport.status import CODES, from_rpc_error, to_status

TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)]


def make(kind: type[OutriderError]) -> OutriderError:
    if kind in (errors.InvalidRequestError, errors.ConfigError):
        return kind("top_p", "must be below 1: größer geht nicht")
    if issubclass(kind, CapacityError):
        return kind("the queue is full", retry_after_ms=250)
    return kind("what happened: Überlauf")


def over_the_wire(error: OutriderError) -> AioRpcError:
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailing = Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return AioRpcError(code, Metadata(), trailing, details=status.message)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_itself(kind: type[OutriderError]) -> None:
    error = make(kind)
    back = from_rpc_error(over_the_wire(error), "somewhere:1")
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.field == error.field
    if isinstance(error, CapacityError):
        assert isinstance(back, CapacityError) and back.retry_after_ms == 250


def test_the_whole_tree_is_in_the_table() -> None:
    assert len(TREE) >= 13
    assert set(TREE) <= set(CODES)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.OutOfPagesError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.PairMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.RequestCancelledError, grpc.StatusCode.CANCELLED),
        (errors.IntegrityError, grpc.StatusCode.INTERNAL),
    ],
)
def test_codes(kind: type[OutriderError], code: grpc.StatusCode) -> None:
    assert to_status(make(kind)).code == code.value[0]


def test_a_subclass_from_elsewhere_goes_as_its_nearest_ancestor() -> None:
    class FullerStillError(CapacityError):
        pass

    back = from_rpc_error(over_the_wire(FullerStillError("full", retry_after_ms=40)), "somewhere:1")
    assert type(back) is CapacityError
    assert back.retry_after_ms == 40


def details(error: OutriderError, kind: type) -> list[object]:
    found: list[object] = []
    for packed in to_status(error).details:
        assert isinstance(packed, any_pb2.Any)
        detail = kind()
        if packed.Unpack(detail):
            found.append(detail)
    return found


def test_details_are_the_standard_ones() -> None:
    bad = InvalidRequestError("temperature", "must be a number")
    (info,) = details(bad, error_details_pb2.ErrorInfo)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("outrider", "InvalidRequestError")
    (request,) = details(bad, error_details_pb2.BadRequest)
    assert isinstance(request, error_details_pb2.BadRequest)
    assert [violation.field for violation in request.field_violations] == ["temperature"]
    (retry,) = details(CapacityError("full", retry_after_ms=1500), error_details_pb2.RetryInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert not details(errors.UnavailableError("gone"), error_details_pb2.BadRequest)


FOREIGN: list[tuple[grpc.StatusCode, str, type[OutriderError]]] = [
    (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", errors.UnavailableError),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineError),
    (grpc.StatusCode.CANCELLED, "Channel closed!", errors.RequestCancelledError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)", InvalidRequestError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams", CapacityError),
    (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.ProtocolError),
    (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", errors.UnavailableError),
    (grpc.StatusCode.UNKNOWN, "Stream removed", errors.UnavailableError),
    (grpc.StatusCode.INTERNAL, "Exception deserializing response!", OutriderError),
]


@pytest.mark.parametrize(("code", "text", "kind"), FOREIGN)
def test_a_status_that_is_not_ours_becomes_the_nearest_error(
    code: grpc.StatusCode, text: str, kind: type[OutriderError]
) -> None:
    back = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details=text), "host:50050")
    assert type(back) is kind
    assert "host:50050" in str(back)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_no_status_is_left_over(code: grpc.StatusCode) -> None:
    assert isinstance(from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details=None), "a:1"), OutriderError)


def test_details_that_are_garbage_do_no_harm() -> None:
    trailing = Metadata(("grpc-status-details-bin", b"\xff\xfe\x01"))
    garbage = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), trailing, details="gone")
    assert type(from_rpc_error(garbage, "a:1")) is errors.UnavailableError


def test_a_long_message_fits_the_headers() -> None:
    """Past 8 KiB of metadata a peer drops the call, and with it what it was told."""
    status = to_status(InvalidRequestError("prompt_token_ids", "x" * 50_000))
    assert len(status.SerializeToString()) < 5_000
