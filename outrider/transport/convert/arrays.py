"""Arrays as little-endian bytes, and tensors of the tensor plane.

``bytes`` fields are read once, because every access copies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.limits import TENSOR_DIMENSIONS
from outrider.types import FloatArray
from outrider.v1 import tensor_pb2

_FLOAT = np.dtype("<f4")
ScalarT = TypeVar("ScalarT", bound=np.generic)

Place = Callable[[FloatArray], tensor_pb2.SharedMemoryRegion | None]
"""Puts an array where the other end can read it, or declines."""
Fetch = Callable[[tensor_pb2.SharedMemoryRegion], NDArray[np.uint8]]
"""The bytes that the other end has put somewhere; ``ProtocolError`` when they are not there."""


def floats_to_bytes(values: FloatArray) -> bytes:
    """float32 values, little-endian."""
    return np.ascontiguousarray(values, dtype=_FLOAT).tobytes()


def floats_from_bytes(name: str, content: bytes) -> FloatArray:
    """The float32 values of a field; ``ProtocolError`` for an invalid length."""
    _require_whole(name, len(content), _FLOAT)
    # A copy: memory of its own, so that a tensor can be made from it without another.
    return np.frombuffer(content, dtype=_FLOAT).astype(np.float32)


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
