"""Generator of k8s/outrider/files/dashboard.json for Grafana; with --check it only compares."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "k8s" / "outrider" / "files" / "dashboard.json"

_SELECTOR = 'namespace=~"$namespace",job=~"$job"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_SPEC = "outrider_spec_decode_num_"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph."""

    title: str
    text: str
    unit: str
    series: tuple[tuple[str, str], ...]
    """(expression, legend)."""


def metric(name: str, **labels: str) -> str:
    """A metric of the jobs that were chosen."""
    more = "".join(f',{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{_SELECTOR}{more}}}"


def rate(name: str, by: str = "", **labels: str) -> str:
    """A counter's rate, added up."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric(name, **labels)}[$__rate_interval]))"


def quantiles(name: str, *, by: str = "", of: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram."""
    grouping = f", {by}" if by else ""
    prefix = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label)
    return tuple(
        (f"histogram_quantile({q}, {rate(f'{name}_bucket', f'le{grouping}')})", f"{prefix}p{100 * q:g}") for q in of
    )


def means(name: str, by: str) -> tuple[tuple[str, str], ...]:
    """Means of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return ((f"{rate(f'{name}_sum', by)} / ({rate(f'{name}_count', by)} > 0)", legend),)


def each(name: str, by: str) -> tuple[tuple[str, str], ...]:
    """A counter's rates by label."""
    return ((rate(name, by), " ".join(f"{{{{{label}}}}}" for label in by.split(", "))),)


def one(expression: str, legend: str) -> tuple[tuple[str, str], ...]:
    """One line."""
    return ((expression, legend),)


ACCEPTED, DRAFTED = rate(f"{_SPEC}accepted_tokens_total"), rate(f"{_SPEC}draft_tokens_total")
DRAFTS, STEPS = rate(f"{_SPEC}drafts_total"), rate("outrider_steps_total")
EMITTED = rate(f"{_SPEC}emitted_tokens_total")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Speculation": (
        Panel(
            "Acceptance rate",
            "Accepted tokens, divided by draft tokens. Of judged tokens: divided by those up to the first rejection.",
            "percentunit",
            (
                (f"{ACCEPTED} / ({DRAFTED} > 0)", "acceptance rate"),
                (f"{ACCEPTED} / ({rate(f'{_SPEC}judged_tokens_total')} > 0)", "acceptance rate of judged tokens"),
            ),
        ),
        Panel(
            "Mean acceptance length",
            "Tokens gained in a step with a proposal, the target's own token included; and the tokens proposed in it.",
            "short",
            ((f"1 + {ACCEPTED} / ({DRAFTS} > 0)", "gained"), (f"{DRAFTED} / ({DRAFTS} > 0)", "proposed")),
        ),
        Panel(
            "Accepted by position",
            "Share of steps with a proposal in which the token at this position was accepted.",
            "percentunit",
            one(
                f"{rate(f'{_SPEC}accepted_tokens_per_pos_total', 'position')} / on () group_left () ({DRAFTS} > 0)",
                "{{position}}",
            ),
        ),
        Panel(
            "Steps without a proposal",
            "Steps a second, by reason.",
            "short",
            each("outrider_steps_without_draft_total", "reason"),
        ),
        Panel(
            "Draft length",
            "Mean over running sessions; probes, and changes between plain and speculative decoding, a second.",
            "short",
            (
                (f"avg({metric('outrider_draft_length')})", "draft length"),
                (rate("outrider_draft_length_probes_total"), "probes"),
                (rate("outrider_draft_length_mode_changes_total"), "changes"),
            ),
        ),
        Panel(
            "Expected throughput",
            "Tokens a second expected without and with speculation, by which the draft length is chosen.",
            "short",
            one(f"sum by (mode) ({metric('outrider_expected_tokens_per_second')})", "{{mode}}"),
        ),
        Panel(
            "Tokens",
            "A second: proposed, accepted, sent to users.",
            "short",
            ((DRAFTED, "proposed"), (ACCEPTED, "accepted"), (EMITTED, "sent")),
        ),
        Panel(
            "System efficiency",
            "Tokens gained in steps with a proposal, divided by what full acceptance would gain; share of such steps.",
            "percentunit",
            (
                (f"({ACCEPTED} + {DRAFTS}) / ({DRAFTED} + {DRAFTS} > 0)", "system efficiency"),
                (f"{DRAFTS} / ({STEPS} > 0)", "steps with a proposal"),
            ),
        ),
    ),
    "Latency": (
        Panel("Time to first token", "", "s", quantiles("outrider_time_to_first_token_seconds")),
        Panel(
            "Inter-token latency",
            "Between two messages with output of a request.",
            "s",
            quantiles("outrider_inter_token_latency_seconds"),
        ),
        Panel(
            "Time per output token",
            "Of whole requests.",
            "s",
            quantiles("outrider_request_time_per_output_token_seconds"),
        ),
        Panel("Requests, end to end", "From arrival to end.", "s", quantiles("outrider_e2e_request_latency_seconds")),
        Panel("Queue time", "Waiting for a turn or KV pages.", "s", quantiles("outrider_request_queue_time_seconds")),
        Panel(
            "Stages of a step, mean",
            "Measured by the coordinator; wire is the part of each wait that was not the service's own time.",
            "s",
            means("outrider_step_stage_seconds", "phase, stage"),
        ),
        Panel(
            "Stages of a step, p99", "", "s", quantiles("outrider_step_stage_seconds", by="phase, stage", of=(0.99,))
        ),
        Panel(
            "Stages in the services, mean",
            "Of a forward; queue: of an item.",
            "s",
            means("outrider_forward_stage_seconds", "role, stage"),
        ),
        Panel(
            "Stages in the services, p99",
            "",
            "s",
            quantiles("outrider_forward_stage_seconds", by="role, stage", of=(0.99,)),
        ),
    ),
    "Load": (
        Panel(
            "Requests",
            "Running, waiting, and paused because their callers do not read.",
            "short",
            (
                (f"sum({metric('outrider_num_requests_running')})", "running"),
                (f"sum({metric('outrider_num_requests_waiting')})", "waiting"),
                (f"sum({metric('outrider_num_requests_paused')})", "paused"),
                (f"{rate('outrider_request_pauses_total')}", "pauses/s"),
            ),
        ),
        Panel("Requests ended", "A second, by outcome.", "reqps", each("outrider_requests_total", "outcome")),
        Panel("Requests refused", "A second, by reason.", "reqps", each("outrider_requests_refused_total", "reason")),
        Panel(
            "Tokens in and out",
            "A second.",
            "short",
            ((rate("outrider_prompt_tokens_total"), "prompt"), (EMITTED, "output")),
        ),
        Panel("Prompt length", "In tokens.", "short", quantiles("outrider_request_prompt_tokens")),
        Panel("Output length", "In tokens.", "short", quantiles("outrider_request_generation_tokens")),
        Panel(
            "KV cache usage",
            "Share of the pages that sessions hold; of a coordinator, in its targets.",
            "percentunit",
            one(metric("outrider_kv_cache_usage_perc"), "{{role}} {{instance}}"),
        ),
        Panel(
            "KV pages",
            "Held by sessions, and free.",
            "short",
            (
                (f"sum by (role) ({metric('outrider_kv_pages_used')})", "{{role}} used"),
                (f"sum by (role) ({metric('outrider_kv_pages_free')})", "{{role}} free"),
            ),
        ),
        Panel(
            "Prefix cache hit rate",
            "Share of the tokens looked up that were found.",
            "percentunit",
            (
                (
                    f"{rate('outrider_prefix_cache_hits_total', 'role')}"
                    f" / ({rate('outrider_prefix_cache_queries_total', 'role')} > 0)",
                    "{{role}}",
                ),
            ),
        ),
        Panel("Cached pages evicted", "A second.", "short", each("outrider_prefix_cache_evictions_total", "role")),
        Panel("Sessions open", "", "short", one(f"sum by (role) ({metric('outrider_sessions_open')})", "{{role}}")),
        Panel("Replicas hung", "A second, by side.", "short", each("outrider_replicas_hung_total", "side")),
        Panel(
            "Work without progress",
            "Age of the oldest forward in flight, or of the oldest runnable item; a hung process ends itself.",
            "s",
            one(f"max by (role) ({metric('outrider_stall_seconds')})", "{{role}}"),
        ),
        Panel("Sequences in a forward", "Mean.", "short", means("outrider_forward_batch_size", "role")),
        Panel("Tokens in a forward", "Mean.", "short", means("outrider_forward_tokens", "role")),
        Panel("Forwards", "A second.", "short", each("outrider_forward_batch_size_count", "role")),
    ),
    "HTTP gateway": (
        Panel(
            "HTTP requests",
            "Answered a second, by status. 499: the client left before there was an answer.",
            "reqps",
            each("outrider_http_requests_total", "path, status"),
        ),
        Panel(
            "HTTP requests being answered",
            "By gateway.",
            "short",
            one(metric("outrider_http_requests_running"), "{{instance}}"),
        ),
        Panel(
            "First byte over HTTP",
            "Of generation requests: of a stream, its first event.",
            "s",
            quantiles("outrider_http_first_byte_seconds", by="path"),
        ),
        Panel(
            "HTTP requests, end to end",
            "Of generation requests: of a stream, to its end.",
            "s",
            quantiles("outrider_http_request_seconds", by="path"),
        ),
    ),
    "Recovery": (
        Panel(
            "Services attached",
            "Replicas that each coordinator is attached to.",
            "short",
            one(metric("outrider_replicas_attached"), "{{side}} of {{instance}}"),
        ),
        Panel("Sessions rebuilt", "A second, by side.", "short", each("outrider_sessions_rebuilt_total", "side")),
        Panel("Requests resumed", "A second.", "short", ((rate("outrider_requests_resumed_total"), "resumed"),)),
        Panel(
            "Late and bad proposals",
            "A second.",
            "short",
            (
                (rate("outrider_draft_timeouts_total"), "timeouts"),
                (rate("outrider_bad_evidence_total"), "bad evidence"),
                (rate("outrider_stale_replies_total"), "stale replies"),
            ),
        ),
        Panel(
            "Hidden states",
            "Bytes a second to drafts, pairs of a target and a draft, by plane; references that were stale a second.",
            "short",
            (
                (rate("outrider_hidden_state_bytes_total", "plane"), "{{plane}} bytes"),
                (f"sum by (plane) ({metric('outrider_tensor_planes')})", "{{plane}} pairs"),
                (rate("outrider_stale_references_total"), "stale references"),
            ),
        ),
        Panel(
            "Direct proposals",
            "Messages a second that went from a draft to a target directly; pairs that may do so.",
            "short",
            (
                (rate("outrider_direct_proposals_total"), "messages"),
                (f"sum({metric('outrider_proposal_channels')})", "pairs"),
            ),
        ),
        Panel(
            "Sessions refused, preempted and lost",
            "A second.",
            "short",
            (
                *each("outrider_sessions_refused_total", "role, reason"),
                (rate("outrider_sessions_preempted_total", "role"), "{{role}} preempted"),
                (rate("outrider_sessions_lost_total", "role"), "{{role}} lost"),
            ),
        ),
        Panel(
            "Items computed before they came",
            "A second, of sessions without drafts. Unused: the session ended or needed something else.",
            "short",
            each("outrider_lookahead_steps_total", "outcome"),
        ),
        Panel(
            "Failures",
            "A second, by error: requests, and sessions in a service.",
            "short",
            (
                (rate("outrider_requests_failed_total", "error"), "request {{error}}"),
                (rate("outrider_sessions_failed_total", "role, error"), "{{role}} session {{error}}"),
            ),
        ),
        Panel(
            "Restarts and builds",
            "Restarts of each process in the last hour.",
            "short",
            one(
                f"changes({metric('process_start_time_seconds')}[1h])"
                f" * on (job, instance) group_left (role, version, commit, model) {metric('outrider_build_info')}",
                "{{role}} {{model}} {{version}} {{commit}}",
            ),
        ),
        Panel(
            "Loading",
            "Time that the last start took.",
            "s",
            (
                (metric("outrider_model_load_seconds"), "{{role}} {{instance}}"),
                (metric("outrider_graph_capture_seconds"), "{{role}} {{instance}}, capturing"),
            ),
        ),
    ),
}


def main() -> int:
    """Write the file, or compare with it."""
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{FILE} is stale: run `make docs`\n")
    return 1


def dashboard() -> dict[str, Any]:
    """The whole."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({**_place(0, top, 24, 1), "type": "row", "title": title, "collapsed": False, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS)
            panels.append(_graph(panel, _place(column * _WIDTH, top + line * _HEIGHT, _WIDTH, _HEIGHT)))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "Outrider",
        "uid": "outrider",
        "tags": ["outrider", "speculative decoding"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _choice("namespace", ""), _choice("job", '{namespace=~"$namespace"}')]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _graph(panel: Panel, place: dict[str, Any]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        **place,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
            for index, (expression, legend) in enumerate(panel.series)
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _choice(label: str, selector: str) -> dict[str, Any]:
    """Everything is chosen at first, also where the label is missing."""
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values(outrider_build_info{selector}, {label})", "refId": label},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    sys.exit(main())
