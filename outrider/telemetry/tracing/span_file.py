"""Span file: spans as OTLP JSON, some of them per line, in the format of the collector's file exporter.

Several processes may write the same file: each line is appended in one write.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence

from outrider.errors import ConfigError
from outrider.telemetry.tracing.otlp_json import request_to_json
from outrider.telemetry.tracing.span import AttributeValue, Span

_log = logging.getLogger(__name__)
_READABLE_BY_OWNER = 0o600


class SpanFile:
    """File to which spans of one process are appended."""

    def __init__(self, path: str, resource: Mapping[str, AttributeValue]) -> None:
        """``resource``: attributes of the process. ``ConfigError`` for a file that cannot be written."""
        self._resource = resource
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _READABLE_BY_OWNER)
        except OSError as error:
            raise ConfigError("trace_file", f"cannot be written: {error}") from error

    def write(self, spans: Sequence[Span]) -> None:
        """Write one line; a failure, such as a full disk, is a warning."""
        line = json.dumps(request_to_json(spans, self._resource), separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            _log.warning("%d spans were not written: %s", len(spans), error)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
