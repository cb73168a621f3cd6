"""Chrome trace: the JSON that Perfetto and chrome://tracing open, with a process for each service."""

from __future__ import annotations

import json
from typing import Any

from outrider.cli.trace.tree import Node

_NS_PER_US = 1e3
_UNKNOWN = "unknown service"


def chrome_trace(root: Node) -> str:
    """The trace of a request in the format "JSON Object" of Chrome's trace events."""
    nodes = sorted(root.walk(), key=lambda node: (node.start_ns, -node.span.duration_ns))
    services = list(dict.fromkeys(node.span.service or _UNKNOWN for node in nodes))
    lanes: dict[str, list[list[int]]] = {service: [] for service in services}
    events = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": service}}
        for number, service in enumerate(services)
    ]
    for node in nodes:
        service = node.span.service or _UNKNOWN
        events.append(_event(node, services.index(service), _lane(lanes[service], node)))
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"trace_id": root.span.trace_id}}
    return json.dumps(content, separators=(",", ":"))


def _event(node: Node, process: int, lane: int) -> dict[str, Any]:
    """A complete event; Chrome's times are microseconds."""
    return {
        "ph": "X",
        "name": node.span.name,
        "pid": process,
        "tid": lane,
        "ts": node.start_ns / _NS_PER_US,
        "dur": node.span.duration_ns / _NS_PER_US,
        "args": dict(node.span.attributes) | ({"error": node.span.error} if node.span.error else {}),
    }


def _lane(lanes: list[list[int]], node: Node) -> int:
    """Number of the first thread on which the event nests: those of one thread may not overlap otherwise.

    ``lanes`` are the ends of the open events of each thread; nodes come in the order of their starts.
    """
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= node.start_ns:
            ends.pop()
        if not ends or node.end_ns <= ends[-1]:
            ends.append(node.end_ns)
            return number
    lanes.append([node.end_ns])
    return len(lanes) - 1
