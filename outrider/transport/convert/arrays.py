"""Arrays as little-endian bytes, and tensors of the tensor plane.

``bytes`` fields are read once, because every access copies them.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.limits import TENSOR_DIMENSIONS, Bound
from outrider.packed_ids import unpack_long
from outrider.types import FloatArray, IntArray, PackedTokenIds
from outrider.v1 import tensor_pb2

_FLOAT = np.dtype("<f4")
_INT = np.dtype("<i4")
ScalarT = TypeVar("ScalarT", bound=np.generic)

Place = Callable[[FloatArray], tensor_pb2.SharedMemoryRegion | None]
"""Puts an array where the other end can read it, or declines."""
Fetch = Callable[[tensor_pb2.SharedMemoryRegion], NDArray[np.uint8]]
"""The bytes that the other end has put somewhere; ``ProtocolError`` when they are not there."""


def floats_to_bytes(values: FloatArray) -> bytes:
    """float32 values, little-endian."""
    return np.ascontiguousarray(values, dtype=_FLOAT).tobytes()


def ints_to_bytes(values: IntArray) -> bytes:
    """int32 values, little-endian."""
    return np.ascontiguousarray(values, dtype=_INT).tobytes()


def floats_from_bytes(name: str, content: bytes, bound: Bound | None = None) -> FloatArray:
    """The float32 values of a field; ``ProtocolError`` for an invalid length.

    ``InvalidRequestError`` if there are more than ``bound``; None: limited only by the message size.
    """
    return _from_bytes(name, content, _FLOAT, bound).astype(np.float32, copy=False)


def ints_from_bytes(name: str, content: bytes, bound: Bound) -> IntArray:
    """The int32 values of a field; ``ProtocolError`` for an invalid length.

    ``InvalidRequestError`` if there are more than ``bound``.
    """
    return _from_bytes(name, content, _INT, bound).astype(np.int32, copy=False)


def token_ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 values, little-endian; ``OverflowError`` for a value that does not fit.

    A repeated field would take five times as long for a long prompt.
    """
    if isinstance(token_ids, PackedTokenIds):
        return token_ids.packed
    return little_endian(array("i", token_ids)).tobytes()


def token_ids_from_bytes(name: str, content: bytes, bound: Bound) -> tuple[int, ...]:
    """The token ids of a field; ``ProtocolError`` for an invalid length.

    ``InvalidRequestError`` if there are more than ``bound``.
    """
    bound.check(name, len(content) // _INT.itemsize)
    _require_whole(name, len(content), _INT)
    return unpack_long(content)


def little_endian(values: array[int]) -> array[int]:
    """The values as they travel; swapped in place where this host is big-endian."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def place_nothing(values: FloatArray) -> None:
    """The ``Place`` of a link without shared memory: every tensor is sent inline."""


def fetch_nothing(region: tensor_pb2.SharedMemoryRegion) -> NoReturn:
    """The ``Fetch`` of a link without shared memory."""
    raise ProtocolError("shared memory: was not agreed on with this link")


def tensor_to_proto(values: FloatArray, place: Place = place_nothing) -> tensor_pb2.Tensor:
    """A float32 array, placed by ``place`` or sent inline."""
    region = place(values)
    if region is not None:
        return tensor_pb2.Tensor(dtype="float32", shape=values.shape, shared_memory=region)
    return tensor_pb2.Tensor(dtype="float32", shape=values.shape, inline=floats_to_bytes(values))


def tensor_from_proto(name: str, message: tensor_pb2.Tensor, fetch: Fetch = fetch_nothing) -> FloatArray:
    """The float32 array of a tensor; ``ProtocolError`` for another type, location or length."""
    payload = message.WhichOneof("payload")
    if message.dtype != "float32" or payload not in ("inline", "shared_memory"):
        raise ProtocolError(
            f"{name}: must be a float32 tensor, inline or shared, not {message.dtype[:20] or 'nothing'}"
        )
    TENSOR_DIMENSIONS.check(name, len(message.shape))
    shape = tuple(message.shape)
    if payload == "inline":
        values = floats_from_bytes(name, message.inline)
    else:
        num_bytes = message.shared_memory.length_bytes
        _require_whole(name, num_bytes, _FLOAT)
        _require_full(name, num_bytes // _FLOAT.itemsize, shape)
        values = fetch(message.shared_memory).view(_FLOAT).astype(np.float32, copy=False)
    _require_full(name, values.size, shape)
    return values.reshape(shape)


def _require_full(name: str, num_values: int, shape: tuple[int, ...]) -> None:
    if num_values != math.prod(shape):
        raise ProtocolError(f"{name}: {num_values} values do not fill the shape {shape}")


def _require_whole(name: str, num_bytes: int, dtype: np.dtype[ScalarT]) -> None:
    if num_bytes % dtype.itemsize:
        raise ProtocolError(f"{name}: {num_bytes} bytes are no whole number of {dtype.itemsize}-byte values")


def _from_bytes(name: str, content: bytes, dtype: np.dtype[ScalarT], bound: Bound | None) -> NDArray[ScalarT]:
    if bound is not None:
        bound.check(name, len(content) // dtype.itemsize)
    _require_whole(name, len(content), dtype)
    # A copy: memory of its own, so that a tensor can be made from it without another.
    return np.frombuffer(content, dtype=dtype).copy()
