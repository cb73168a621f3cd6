"""Says which services, rpcs, messages, fields and enum values of .proto files have no comment of their own.

Asks protoc itself: a descriptor set with source info carries each comment at its element's path.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

Place = tuple[int, ...]
_FILE = descriptor_pb2.FileDescriptorProto
_MESSAGE = descriptor_pb2.DescriptorProto
_ENUM = descriptor_pb2.EnumDescriptorProto
_SERVICE = descriptor_pb2.ServiceDescriptorProto


def main(folder: Path) -> int:
    """The exit status: 1 when something has no comment."""
    bare = [f"{file.name}: {name}" for file in parse(folder) for name in undocumented(file)]
    for name in bare:
        print(f"no comment: {name}", file=sys.stderr)
    return 1 if bare else 0


def parse(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    """The files of ``<root>/outrider/v1``, with their comments."""
    root = folder.parents[1]
    files = sorted(str(path) for path in folder.glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        arguments = ["protoc", f"-I{root}", f"--descriptor_set_out={out.name}", "--include_source_info", *files]
        if not files or protoc.main(arguments) != 0:
            raise SystemExit(f"protoc could not read the .proto files of {folder}")
        descriptors = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return list(descriptors.file)


def undocumented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    """The full names of what has no comment right before it."""
    documented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    return [name for place, name in _elements(file) if place not in documented]


def _elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[Place, str]]:
    for index, message in enumerate(file.message_type):
        yield from _of_message((_FILE.MESSAGE_TYPE_FIELD_NUMBER, index), message, message.name)
    for index, enum in enumerate(file.enum_type):
        yield from _of_enum((_FILE.ENUM_TYPE_FIELD_NUMBER, index), enum, enum.name)
    for index, service in enumerate(file.service):
        place = (_FILE.SERVICE_FIELD_NUMBER, index)
        yield place, service.name
        for number, method in enumerate(service.method):
            yield (*place, _SERVICE.METHOD_FIELD_NUMBER, number), f"{service.name}.{method.name}"


def _of_message(place: Place, message: descriptor_pb2.DescriptorProto, name: str) -> Iterator[tuple[Place, str]]:
    if message.options.map_entry:
        return  # made by the compiler for a map field
    yield place, name
    for index, field in enumerate(message.field):
        yield (*place, _MESSAGE.FIELD_FIELD_NUMBER, index), f"{name}.{field.name}"
    for index, nested in enumerate(message.nested_type):
        yield from _of_message((*place, _MESSAGE.NESTED_TYPE_FIELD_NUMBER, index), nested, f"{name}.{nested.name}")
    for index, enum in enumerate(message.enum_type):
        yield from _of_enum((*place, _MESSAGE.ENUM_TYPE_FIELD_NUMBER, index), enum, f"{name}.{enum.name}")


def _of_enum(place: Place, enum: descriptor_pb2.EnumDescriptorProto, name: str) -> Iterator[tuple[Place, str]]:
    yield place, name
    for index, value in enumerate(enum.value):
        yield (*place, _ENUM.VALUE_FIELD_NUMBER, index), f"{name}.{value.name}"


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
