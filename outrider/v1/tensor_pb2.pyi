from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorPlane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_PLANE_UNSPECIFIED: _ClassVar[TensorPlane]
    TENSOR_PLANE_INLINE: _ClassVar[TensorPlane]
    TENSOR_PLANE_SHARED_MEMORY: _ClassVar[TensorPlane]
TENSOR_PLANE_UNSPECIFIED: TensorPlane
TENSOR_PLANE_INLINE: TensorPlane
TENSOR_PLANE_SHARED_MEMORY: TensorPlane

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "inline", "shared_memory")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    shared_memory: SharedMemoryRegion
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ..., shared_memory: _Optional[_Union[SharedMemoryRegion, _Mapping]] = ...) -> None: ...

class SharedMemoryRegion(_message.Message):
    __slots__ = ("name", "offset_bytes", "length_bytes", "slot", "sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset_bytes: int
    length_bytes: int
    slot: int
    sequence: int
    def __init__(self, name: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., slot: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class PlaneOffer(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PlaneAnswer(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...
