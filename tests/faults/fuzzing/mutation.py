"""Random changes to any protobuf message, by its descriptor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_SMALL = (0, 0, 1, 1, 2, 3, 7, 16, 255)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e-9, 2.0, 100.0, 1e30, -1e30, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "a",
    "\x00",
    "é",
    "漢" * 50,
    "\n",
    "}" * 300,
    "\U0001f600",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "x" * 5000,
)
_COUNTS = (0, 1, 1, 2, 3, 5, 20, 300)
_DEPTH = 4

_INTEGERS: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 9),
}


class Mutator:
    """Changes drawn from one source of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._make: dict[int, Callable[[], Any]] = {
            FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
            FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(_FLOATS),
            FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(_FLOATS),
        }

    def mutate(self, message: Message, num_changes: int = 1) -> None:
        """Set so many fields, at any depth, to extreme values; some are cleared."""
        for _ in range(num_changes):
            self._change(message, _DEPTH)

    def spoil(self, content: bytes) -> bytes:
        """Bytes that are cut short, changed in places, followed by others, or others altogether."""
        kind = self._rng.randrange(4)
        if kind == 0:
            return content[: self._rng.randint(0, len(content))]
        if kind == 1:
            return content + self._rng.randbytes(self._rng.choice((1, 8, 100)))
        if kind == 2:
            return self._rng.randbytes(self._rng.choice((0, 1, 10, 1000)))
        changed = bytearray(content)
        for _ in range(self._rng.randint(1, 4) if changed else 0):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return bytes(changed)

    def _change(self, message: Message, depth: int) -> None:
        field = self._field_of(message)
        if field is None:
            return
        if self._rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._change_list(message, field, depth)
        elif field.message_type is not None:
            self._into(getattr(message, field.name), depth)
        else:
            setattr(message, field.name, self._value(field))

    def _field_of(self, message: Message) -> FieldDescriptor | None:
        """Any field; twice as likely one that is set, whose change reaches further."""
        fields: list[FieldDescriptor] = [*message.DESCRIPTOR.fields, *(field for field, _ in message.ListFields())]
        return self._rng.choice(fields) if fields else None

    def _into(self, message: Message, depth: int) -> None:
        message.SetInParent()
        if depth:
            self._change(message, depth - 1)

    def _change_list(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        entries = getattr(message, field.name)
        if entries and self._rng.random() < 0.5:
            self._change_entry(entries, field, depth)
            return
        count = self._rng.choice(_COUNTS)
        if field.message_type is None:
            entries.extend(self._value(field) for _ in range(count))
            return
        for _ in range(min(count, 20)):
            self._into(entries.add(), depth)

    def _change_entry(self, entries: Any, field: FieldDescriptor, depth: int) -> None:
        place = self._rng.randrange(len(entries))
        if field.message_type is not None:
            self._into(entries[place], depth)
        else:
            entries[place] = self._value(field)

    def _value(self, field: FieldDescriptor) -> Any:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return self._rng.choice(_TEXTS)
        if field.cpp_type in _INTEGERS:
            return self._integer(*_INTEGERS[field.cpp_type])
        return self._make[field.cpp_type]()

    def _integer(self, least: int, most: int) -> int:
        kind = self._rng.randrange(4)
        if kind == 0:
            return self._rng.choice((least, most, least + 1, most - 1))
        if kind == 1:
            return self._rng.randint(least, most)
        if kind == 2:
            return min(most, 1 << self._rng.randrange(most.bit_length()))
        return min(most, self._rng.choice(_SMALL))

    def _bytes(self) -> bytes:
        count = self._rng.choice(_COUNTS)
        kind = self._rng.randrange(3)
        if kind == 0:
            return b"\x00\x00\xc0\x7f" * count  # float32 NaN
        if kind == 1:
            return b"".join(self._rng.randrange(2048).to_bytes(4, "little") for _ in range(count))
        return self._rng.randbytes(count)
