"""Logging of one process: readable lines on a terminal, otherwise one JSON object per line.

Library code only calls ``logging.getLogger(__name__)``; the ``__main__`` of a process calls ``set_up_logging`` once.
Additional fields of a record are given as ``extra={"fields": {...}}`` and become keys of the object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TextIO

from outrider.telemetry.output import DroppingStream

about_request: ContextVar[Mapping[str, str]] = ContextVar("about_request", default=MappingProxyType({}))
"""Fields of every record made while something is done for a request: its id, and its trace's where it has one."""


@contextmanager
def records_about(fields: Mapping[str, str]) -> Iterator[None]:
    """Let ``about_request`` be ``fields`` within the block."""
    before = about_request.set(fields)
    try:
        yield
    finally:
        about_request.reset(before)


_QUIET = ("grpc", "asyncio", "urllib3", "transformers", "filelock")


_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Characters that end a line or control a terminal. Messages and fields hold texts of callers, which could forge lines
of the log with them.
"""


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, service, logger, message, the record's fields, error."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False).translate(_ESCAPED)


class PlainFormatter(logging.Formatter):
    """A readable line: time, level, service, message, fields."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        return (super().formatMessage(record) + fields).translate(_ESCAPED)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401 - the type of the base class is not public
        """The traceback, indented: a text in it cannot pass for a line of its own."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  {line}" for line in lines).translate({**_ESCAPED, ord("\n"): "\n"})


def set_up_logging(level: str = "info", *, service: str, stream: TextIO | None = None) -> None:
    """Send every record at or above ``level`` to ``stream`` (default: standard error); a second call replaces the
    first.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter(service) if stream.isatty() else JsonFormatter(service))
    if isinstance(stream, DroppingStream):
        stream.notice = lambda count: handler.format(_dropped_record(count))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _dropped_record(count: int) -> logging.LogRecord:
    """The record that stands for lines that could not be written."""
    message = "%d lines of the log were dropped while it could not be written"
    record = logging.LogRecord(DroppingStream.__module__, logging.WARNING, "", 0, message, (count,), None)
    record.fields = {"num_dropped": count}
    return record


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", {})
    return {**about_request.get(), **(fields if isinstance(fields, dict) else {})}
