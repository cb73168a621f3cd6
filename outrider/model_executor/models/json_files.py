"""JSON files of a model folder: read whole, and checked against a schema before anything is believed.

Every trouble is a ``ModelError`` of one line that names the file, the field and what was expected. Refuses to know what
the fields mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from outrider.errors import ModelError
from outrider.limits.bounded_files import MAX_SETTINGS_BYTES, read_bounded, read_of_folder

ValueT = TypeVar("ValueT")

_MAX_SHOWN = 60
"""Characters of a wrong value."""


def is_there(path: Path) -> bool:
    """True if a file is there; ``ModelError`` when what is there is no file that can be read, a dangling link say."""
    try:
        if path.is_file():
            return True
        if path.is_symlink():
            raise ModelError(f"{path} is a link to nowhere, or to no file")
        if path.exists():
            raise ModelError(f"{path} is no regular file")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return False


def read_bytes(folder: Path, name: str, most: int = MAX_SETTINGS_BYTES, *, may_be_elsewhere: bool = False) -> bytes:
    """The content of a model folder's file; ``ModelError`` for one of more than ``most`` bytes, or a link out of the
    folder unless it ``may_be_elsewhere``.
    """
    path = folder / name
    try:
        return read_bounded(path, most) if may_be_elsewhere else read_of_folder(folder, name, most)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def read_object(path: Path, most: int = MAX_SETTINGS_BYTES, *, may_be_elsewhere: bool = False) -> dict[str, Any]:
    """The JSON object that a model folder's file of at most ``most`` bytes holds. ``may_be_elsewhere``: the file may be
    a link out of the folder, as weights may be.
    """
    if not is_there(path):
        raise ModelError(f"{path} is missing: a model folder has config.json and *.safetensors")
    return parse_object(path, read_bytes(path.parent, path.name, most, may_be_elsewhere=may_be_elsewhere))


def parse_object(path: Path, content: bytes, what: str = "") -> dict[str, Any]:
    """The JSON object that the content of a file, or the part of it called ``what``, is."""
    where = f"{path}{what}"
    try:
        parsed = json.loads(content.decode("utf-8-sig"), object_hook=_with_floats)
    except UnicodeDecodeError as error:
        raise ModelError(f"{where} is not JSON in UTF-8: byte {error.start} does not fit") from error
    except RecursionError as error:
        raise ModelError(f"{where} cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ModelError(f"{where} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{where} holds no JSON object")
    return parsed


def _with_floats(parsed: dict[str, Any]) -> dict[str, Any] | float:
    """A number that JSON has not, which transformers writes as an object; other objects as they are."""
    named = parsed.get("__float__") if len(parsed) == 1 else None
    return float(named) if named in ("Infinity", "-Infinity", "NaN") else parsed


def validated(path: Path, schema: TypeAdapter[ValueT], content: object, what: str = "") -> ValueT:
    """The content as the schema has it; ``ModelError`` names the first field at fault and what was expected."""
    try:
        return schema.validate_python(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        raise ModelError(f"{path}{what}: {_trouble(found)}") from error
    except RecursionError as error:
        raise ModelError(f"{path}{what} is nested too deeply") from error


def one_line(error: BaseException) -> str:
    """Text of an error on one line of bounded length."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 300 else f"{said[:297]}..."


def shown(value: object) -> str:
    """A wrong value, on one line of bounded length."""
    try:
        said = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return type(value).__name__
    return said if len(said) <= _MAX_SHOWN else f"{said[: _MAX_SHOWN - 3]}..."


def _trouble(found: Any) -> str:  # noqa: ANN401 - pydantic's own dictionary
    # The branches of a union follow the field in the location; a field's own name is what a reader can look for.
    parts = [str(part)[:_MAX_SHOWN] for part in found["loc"]]
    place = ".".join(part for part in parts if "constrained-" not in part)
    message = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = "" if found["type"] == "missing" else f", not {shown(found['input'])}"
    if not place or message.startswith(place):
        return f"{message}{value if place else ''}"
    return f"{place} {message[0].lower()}{message[1:]}{value}"
