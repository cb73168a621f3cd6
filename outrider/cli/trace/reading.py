"""Spans out of files: OTLP's JSON, one export a line, as ``trace_file`` and a collector's file exporter write it.

A file may also hold one export that is spread over many lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.telemetry.tracing.otlp_json import spans_from_json
from outrider.telemetry.tracing.span import Span


def read_spans(paths: Sequence[Path]) -> list[Span]:
    """The spans of all files; ``ConfigError`` names the file and the line that cannot be read."""
    return [span for path in paths for span in _read_file(path)]


class Followed:
    """Files that are being written: what was added since this was made."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._ends = {path: path.stat().st_size if path.exists() else 0 for path in paths}

    def added(self) -> list[Span]:
        """The spans that came since the last call; a line that is not finished waits for the next."""
        found: list[Span] = []
        for path, end in self._ends.items():
            if path.exists():
                content = _content(path, end)
                whole = content[: content.rfind(b"\n") + 1]
                self._ends[path] += len(whole)
                found += _spans_of_lines(path, whole)
        return found


def _read_file(path: Path) -> list[Span]:
    content = _content(path, 0)
    try:
        exports = [json.loads(content)]
    except ValueError:
        return list(_spans_of_lines(path, content))
    return [span for export in exports for span in _spans_of(path, "", export)]


def _content(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from error


def _spans_of_lines(path: Path, content: bytes) -> Iterator[Span]:
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                export = json.loads(line)
            except ValueError as error:
                raise ConfigError(str(path), f"line {number} is no JSON: {error}") from error
            yield from _spans_of(path, f"line {number} ", export)


def _spans_of(path: Path, where: str, export: object) -> list[Span]:
    if isinstance(export, dict) and "resourceSpans" not in export and {"resourceMetrics", "resourceLogs"} & set(export):
        return []  # a collector may write all signals into one file
    try:
        return list(spans_from_json(export))  # type: ignore[arg-type] # what is no export raises one of these
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            str(path), f"{where}is no export of spans ({type(error).__name__}: {error}); expected OTLP's JSON"
        ) from error
