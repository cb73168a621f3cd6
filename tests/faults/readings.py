"""Readings of a process from outside: its metrics over HTTP, its memory, files and threads from /proc."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 30.0
_MIB = 1 << 20

Metrics = dict[str, float]
"""Samples by name, each with the values of its labels after it: ``outrider_replicas_attached/draft``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and sessions of one process."""

    rss_mib: float
    num_files: int
    num_threads: int


def usage_of(pid: int) -> Usage | None:
    """Usage of a process; None when it is gone."""
    folder = Path("/proc") / str(pid)
    try:
        pages = int((folder / "statm").read_text().split()[1])
        num_files = sum(1 for _ in (folder / "fd").iterdir())
        num_threads = sum(1 for _ in (folder / "task").iterdir())
    except (OSError, IndexError):
        return None
    return Usage(pages * 4096 / _MIB, num_files, num_threads) if pages else None


async def metrics_of(port: int) -> Metrics | None:
    """Metrics that a process serves at this port of loopback; None when it does not answer in time."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return parse_metrics(await _get(port))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None


def parse_metrics(text: str) -> Metrics:
    """Prometheus' text as samples by name and label values."""
    return {
        "/".join([sample.name, *(value for key, value in sample.labels.items() if key != "role")]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def _get(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: loopback\r\n\r\n")
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise ConnectionError(f"no metrics at port {port}: {head[:80]!r}")
    return body.decode()
