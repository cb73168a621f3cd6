"""Arrays as little-endian bytes, and tensors of the tensor plane.

``bytes`` fields are read once: every access to one copies it.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ProtocolError
from outrider.types import FloatArray, IntArray
from outrider.v1 import tensor_pb2

_FLOAT = np.dtype("<f4")
_INT = np.dtype("<i4")
ScalarT = TypeVar("ScalarT", bound=np.generic)


def floats_to_bytes(values: FloatArray) -> bytes:
    """float32 values, little-endian."""
    return np.ascontiguousarray(values, dtype=_FLOAT).tobytes()


def ints_to_bytes(values: IntArray) -> bytes:
    """int32 values, little-endian."""
    return np.ascontiguousarray(values, dtype=_INT).tobytes()


def floats_from_bytes(name: str, content: bytes) -> FloatArray:
    """The float32 values of a field; ``ProtocolError`` when its length is not theirs."""
    return _from_bytes(name, content, _FLOAT).astype(np.float32, copy=False)


def ints_from_bytes(name: str, content: bytes) -> IntArray:
    """The int32 values of a field; ``ProtocolError`` when its length is not theirs."""
    return _from_bytes(name, content, _INT).astype(np.int32, copy=False)


def tensor_to_proto(values: FloatArray) -> tensor_pb2.Tensor:
    """A float32 array, inline."""
    return tensor_pb2.Tensor(dtype="float32", shape=values.shape, inline=floats_to_bytes(values))


def tensor_from_proto(name: str, message: tensor_pb2.Tensor) -> FloatArray:
    """The float32 array of an inline tensor; ``ProtocolError`` when it is anything else or of another length."""
    if message.dtype != "float32" or message.WhichOneof("payload") != "inline":
        raise ProtocolError(f"{name}: must be an inline float32 tensor, not {message.dtype or 'nothing'}")
    shape = tuple(message.shape)
    values = floats_from_bytes(name, message.inline)
    if values.size != math.prod(shape):
        raise ProtocolError(f"{name}: {values.size} values do not fill the shape {shape}")
    return values.reshape(shape)


def _from_bytes(name: str, content: bytes, dtype: np.dtype[ScalarT]) -> NDArray[ScalarT]:
    if len(content) % dtype.itemsize:
        raise ProtocolError(f"{name}: {len(content)} bytes are no whole number of {dtype.itemsize}-byte values")
    # A copy: memory of its own, so that a tensor can be made from it without another.
    return np.frombuffer(content, dtype=dtype).copy()
