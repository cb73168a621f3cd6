"""Public requests of up to 8 MB: every list and every text of the message in turn, filled with as much as fits.

Made as bytes by the descriptor, so that fields which are added later are filled too, and quickly, so that a machine's
processors are left to those who have to bear it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from outrider.v1 import generation_pb2

SIZES = (20_000, 300_000, 2_000_000, 7_900_000)
_DEPTH = 3
_MANY = 64


@dataclass(frozen=True, slots=True)
class Filling:
    """One field and a way to fill it."""

    path: tuple[FieldDescriptor, ...]
    way: str
    """"entries" (as many as fit, as small as can be), "long" (one entry) or "some" (64 long entries)."""

    def __str__(self) -> str:
        return f"{'.'.join(field.name for field in self.path)} {self.way}"

    def request(self, size: int) -> bytes:
        """An honest request, and this field filled with about so many bytes."""
        content = self._content(size)
        for field in reversed(self.path[:-1]):
            content = _delimited(field, content)
        return HONEST + content

    def _content(self, size: int) -> bytes:
        field = self.path[-1]
        if self.way == "entries" and _is_delimited(field):
            entry = _delimited(field, b"")
            return entry * (size // len(entry))
        if self.way == "entries":
            return _delimited(field, b"\x05" * size)  # packed: each byte an id, the same one
        count = _MANY if self.way == "some" else 1
        return _delimited(field, b"ab" * (size // count // 2)) * count


def fillings() -> list[Filling]:
    """Every field that can be long, in every way."""
    return list(_fillings(generation_pb2.GenerateRequest.DESCRIPTOR, (), _DEPTH))


def draw(rng: random.Random, *, sizes: tuple[int, ...] = SIZES) -> tuple[str, bytes]:
    """One of them, and what it is."""
    filling, size = rng.choice(fillings()), rng.choice(sizes)
    return f"{filling}, {size} bytes", filling.request(size)


def _fillings(descriptor: Any, path: tuple[FieldDescriptor, ...], depth: int) -> Iterator[Filling]:
    for field in descriptor.fields:
        here = (*path, field)
        if field.is_repeated:
            yield Filling(here, "entries")
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            yield Filling(here, "long")
            if field.is_repeated:
                yield Filling(here, "some")
        if field.message_type is not None and depth:
            yield from _fillings(field.message_type, here, depth - 1)


def _is_delimited(field: FieldDescriptor) -> bool:
    return field.message_type is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING


def _delimited(field: FieldDescriptor, content: bytes) -> bytes:
    return _varint(field.number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


HONEST = generation_pb2.GenerateRequest(prompt_text="def f", max_tokens=4).SerializeToString()
"""Comes before every filling."""
