"""One streamed completion over HTTP, and when its tokens came.

Owns the connection and the events. An event is parsed when its stream has ended: a busy client would be measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from outrider.errors import UnavailableError

_READ_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300
"""Characters of an error response that a message shows."""


@dataclass(frozen=True, slots=True)
class TimedStream:
    """One streamed completion. Times are readings of the monotonic clock, which processes of a host share."""

    began: float
    first: float
    """Arrival of the first event with a choice."""
    last: float
    num_tokens: int
    token_ids: tuple[int, ...]
    """Empty if the server returns no ids."""
    text: str


async def stream_completion(base_url: str, body: Mapping[str, Any]) -> TimedStream:
    """Send one request to ``/v1/completions``; ``UnavailableError`` unless its stream ends as it should."""
    url = urlsplit(base_url)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(url.hostname, _port(url), ssl=url.scheme == "https" or None)
        try:
            writer.write(_head(url, len(content)) + content)
            status, headers = await _response_head(reader)
            lines = [(time.monotonic(), line) async for line in _lines(reader, headers)]
        finally:
            writer.close()
    except asyncio.IncompleteReadError as error:
        raise UnavailableError(f"{base_url} closed the connection in the middle of its answer") from error
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise UnavailableError(f"{base_url}: {error or type(error).__name__}") from error
    if status != 200:
        shown = b" ".join(line for _, line in lines).decode(errors="replace")[:_SHOWN_CHARACTERS]
        raise UnavailableError(f"{base_url} answered with status {status}: {shown}")
    return _parse(base_url, began, lines)


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _head(url: SplitResult, num_bytes: int) -> bytes:
    lines = (
        f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {url.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _response_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, whose names are in small letters."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/") or not status[:3].isdecimal():
        raise ValueError(f"{first[:_SHOWN_CHARACTERS]!r} is no status line of HTTP")
    return int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _lines(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Lines of the body that are not empty, as they come."""
    rest = b""
    async for part in _parts(reader, headers):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line.strip()
    if rest.strip():
        yield rest.strip()


def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunks(reader)
    return _counted(reader, int(headers["content-length"])) if "content-length" in headers else _until_end(reader)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _counted(reader: asyncio.StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(num_bytes)


async def _until_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(_READ_BYTES):
        yield part


def _parse(base_url: str, began: float, lines: list[tuple[float, bytes]]) -> TimedStream:
    times: list[float] = []
    texts: list[str] = []
    token_ids: list[int] = []
    num_tokens = None
    for when, line in lines:
        content = line.removeprefix(b"data:").strip()
        if content in {line, b"[DONE]"}:
            continue
        try:
            event = json.loads(content)
            if event.get("error"):
                raise UnavailableError(f"{base_url}: {str(event['error'])[:_SHOWN_CHARACTERS]}")
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices") or ():
                times.append(when)
                texts.append(choice.get("text") or "")
                token_ids += choice.get("token_ids") or ()
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            shown = content.decode(errors="replace")[:_SHOWN_CHARACTERS]
            raise UnavailableError(f"{base_url} sent an event that is none of a completion: {shown}") from error
    if not times or num_tokens is None:
        raise UnavailableError(f"{base_url}: a stream ended after {len(times)} events without its usage")
    return TimedStream(began, times[0], times[-1], num_tokens, tuple(token_ids), "".join(texts))
