from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "inline")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ...) -> None: ...

class TensorPlaneReference(_message.Message):
    __slots__ = ("plane_id", "offset_bytes", "num_bytes", "sequence")
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    plane_id: bytes
    offset_bytes: int
    num_bytes: int
    sequence: int
    def __init__(self, plane_id: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class TensorPlaneRequest(_message.Message):
    __slots__ = ("connection",)
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    def __init__(self, connection: _Optional[int] = ...) -> None: ...

class TensorPlaneOffer(_message.Message):
    __slots__ = ("connection", "offer_id", "token", "host", "port")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    connection: int
    offer_id: bytes
    token: bytes
    host: str
    port: int
    def __init__(self, connection: _Optional[int] = ..., offer_id: _Optional[bytes] = ..., token: _Optional[bytes] = ..., host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class TensorPlaneClose(_message.Message):
    __slots__ = ("connection",)
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    def __init__(self, connection: _Optional[int] = ...) -> None: ...

class TensorPlaneReason(_message.Message):
    __slots__ = ("kind", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TensorPlaneChosen(_message.Message):
    __slots__ = ("connection", "kind", "round_trip_ms", "reasons", "is_closed")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    connection: int
    kind: str
    round_trip_ms: float
    reasons: _containers.RepeatedCompositeFieldContainer[TensorPlaneReason]
    is_closed: bool
    def __init__(self, connection: _Optional[int] = ..., kind: _Optional[str] = ..., round_trip_ms: _Optional[float] = ..., reasons: _Optional[_Iterable[_Union[TensorPlaneReason, _Mapping]]] = ..., is_closed: bool = ...) -> None: ...
