"""A trace as one HTML file that needs nothing else: no network, no other file.

The page itself is ``page.html`` beside this module; here its data is put in.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from outrider.cli.trace.stages import stage_figures, summary
from outrider.cli.trace.tree import Node, num_steps_not_traced
from outrider.telemetry.tracing import names

_MARK = "/*TRACE*/null"


def render_page(root: Node) -> str:
    """The whole file."""
    template = files("outrider.cli.trace").joinpath("page.html").read_text(encoding="utf-8")
    before, found, after = template.partition(_MARK)
    if not found:
        raise ValueError(f"page.html has no {_MARK}")
    return before + _script_safe(page_data(root)) + after


def page_data(root: Node) -> dict[str, Any]:
    """Data of the page as plain JSON; times in nanoseconds from the request's arrival."""
    attributes = root.span.attributes
    return {
        "trace_id": root.span.trace_id,
        "request_id": attributes.get(names.REQUEST_ID, ""),
        "model": attributes.get(names.REQUEST_MODEL, ""),
        "summary": [list(pair) for pair in summary(root)],
        "began_ns": root.span.start_ns,
        "steps_not_traced": num_steps_not_traced(root),
        "root": _node_to_json(root),
        "stages": [
            {
                "name": found.name,
                "whose": found.whose,
                "count": found.count,
                "total": found.total_ns,
                "mean": found.mean_ns,
                "share": found.share,
            }
            for found in stage_figures(root)
        ],
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    span = node.span
    return {
        "name": span.name,
        "service": span.service,
        "start": node.start_ns,
        "took": span.duration_ns,
        "error": span.error,
        "attributes": dict(span.attributes),
        "children": [_node_to_json(child) for child in node.children],
    }


def _script_safe(data: dict[str, Any]) -> str:
    """JSON that cannot end the script it stands in, whatever a request was named."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
