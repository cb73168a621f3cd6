"""Every metric there is: name, kind, meaning, labels, and the PromQL that it is for.

``docs/metrics.md`` is made from this, the endpoint takes names and texts from it, and tests hold the dashboard, the
alert rules and what the processes really say against it. Names after the prefix are vLLM's where vLLM has the metric.
Imports nothing of Prometheus.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache


class Kind(enum.Enum):
    """What a metric is, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric."""

    name: str
    text: str
    """What its values are."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    kind: Kind
    roles: tuple[str, ...]
    """Whose it is."""
    text: str
    promql: str
    """What it is read for."""
    labels: tuple[Label, ...] = ()


COORDINATOR = ("coordinator",)
SERVICES = ("draft", "target")
EVERYBODY = ("coordinator", "draft", "target")

_ROLE = Label("role", "draft or target")
_SIDE = Label("side", "draft or target")
_REASON_NOT = Label(
    "reason",
    "prefill, not_asked, load, not_worth, prompts, catching_up, last_token, outgrown, late, away, refused, lost,"
    " failed, bad_evidence, nothing_proposed",
)
_WINDOW = "[$__rate_interval]"


def _rate(name: str) -> str:
    return f"sum(rate({name}{_WINDOW}))"


def _quantile(name: str, by: str = "") -> str:
    grouping = f", {by}" if by else ""
    return f"histogram_quantile(0.99, sum by (le{grouping}) (rate({name}_bucket{_WINDOW})))"


def _counter(name: str, text: str, promql: str = "", *labels: Label) -> MetricSpec:
    return MetricSpec(name, Kind.COUNTER, COORDINATOR, text, promql or _rate(name), labels)


def _gauge(name: str, text: str, promql: str = "", *labels: Label) -> MetricSpec:
    return MetricSpec(name, Kind.GAUGE, COORDINATOR, text, promql or f"sum({name})", labels)


def _histogram(name: str, text: str, *labels: Label) -> MetricSpec:
    by = ", ".join(label.name for label in labels)
    return MetricSpec(name, Kind.HISTOGRAM, COORDINATOR, text, _quantile(name, by), labels)


_ACCEPTED = _rate("outrider_spec_decode_num_accepted_tokens_total")
_DRAFTS = _rate("outrider_spec_decode_num_drafts_total")
_DRAFTED = _rate("outrider_spec_decode_num_draft_tokens_total")
_EMITTED = _rate("outrider_spec_decode_num_emitted_tokens_total")
_STEPS = _rate("outrider_steps_total")

SPECULATION = (
    _counter("outrider_steps_total", "Steps judged: scoring passes of one session, prefills included."),
    _counter(
        "outrider_spec_decode_num_drafts_total",
        "Steps that had a proposal.",
        f"{_DRAFTS} / ({_STEPS} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_draft_tokens_total",
        "Tokens drafted.",
        f"{_DRAFTED} / ({_DRAFTS} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_total",
        "Tokens drafted and accepted. By drafted tokens it is vLLM's acceptance rate; the mean acceptance length is one"
        " more than accepted tokens by drafts.",
        f"1 + {_ACCEPTED} / ({_DRAFTS} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_judged_tokens_total",
        "Tokens drafted and not after their step's first rejection. Accepted by judged tokens is the acceptance.",
        f"{_ACCEPTED} / ({_rate('outrider_spec_decode_num_judged_tokens_total')} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_per_pos_total",
        "Tokens accepted, by their place in the proposal.",
        f"sum by (position) (rate(outrider_spec_decode_num_accepted_tokens_per_pos_total{_WINDOW}))"
        f" / ignoring(position) group_left () ({_DRAFTS} > 0)",
        Label("position", "0 for the first draft token"),
    ),
    _counter(
        "outrider_spec_decode_num_emitted_tokens_total",
        "Tokens given to users. By steps and drafted tokens together it is vLLM's efficiency: what came of what was"
        " scored.",
        f"{_EMITTED} / ({_STEPS} + {_DRAFTED} > 0)",
    ),
    _counter(
        "outrider_steps_without_draft_total",
        "Steps judged without a proposal, by why.",
        f"sum by (reason) (rate(outrider_steps_without_draft_total{_WINDOW}))",
        _REASON_NOT,
    ),
    _gauge(
        "outrider_draft_length", "Draft length that running sessions are given now, on average; 0: decoding is plain."
    ),
    _gauge(
        "outrider_expected_tokens_per_second",
        "Tokens a second that all sessions together are expected to get from plain and from speculative decoding: what"
        " the draft length is chosen by.",
        "sum by (mode) (outrider_expected_tokens_per_second)",
        Label("mode", "plain or speculative"),
    ),
    _counter("outrider_draft_length_mode_changes_total", "How often decoding became plain or speculative."),
    _counter(
        "outrider_draft_length_probes_total",
        "How often a few sessions drafted while decoding was plain, to see whether it pays again.",
    ),
)

LATENCY = (
    _histogram("outrider_time_to_first_token_seconds", "From a request's arrival to its first output."),
    _histogram(
        "outrider_inter_token_latency_seconds",
        "Between two messages with output of one request; a message brings one token or, with a draft, several.",
    ),
    _histogram(
        "outrider_request_time_per_output_token_seconds",
        "Of one request: time after the first output, by the tokens after the first.",
    ),
    _histogram("outrider_e2e_request_latency_seconds", "From a request's arrival to its end, whatever the end."),
    _histogram("outrider_request_queue_time_seconds", "From a request's arrival until it runs for the first time."),
    _histogram(
        "outrider_step_stage_seconds",
        "Stages of a step as the coordinator sees them: the draft's and the target's own time (draft, score), the"
        " coordinator's to judge (accept), and what of each wait for a service was not the service's (wire).",
        Label("stage", "draft, score, accept or wire"),
    ),
)

LOAD = (
    _gauge("outrider_num_requests_running", "Requests that run."),
    _gauge("outrider_num_requests_waiting", "Requests that wait for their turn or for pages."),
    _counter(
        "outrider_requests_total",
        "Requests that have ended.",
        f"sum by (outcome) (rate(outrider_requests_total{_WINDOW}))",
        Label("outcome", "stop, length, cancelled or failed"),
    ),
    _counter(
        "outrider_requests_failed_total",
        "Requests that ended with an error, by its name in outrider/errors.py.",
        f"sum by (error) (rate(outrider_requests_failed_total{_WINDOW}))",
        Label("error", "name of the error"),
    ),
    _counter(
        "outrider_requests_refused_total",
        "Requests that were not taken in.",
        f"sum by (reason) (rate(outrider_requests_refused_total{_WINDOW}))",
        Label("reason", "queue_full, invalid or unavailable"),
    ),
    _counter("outrider_prompt_tokens_total", "Prompt tokens of the requests taken in."),
    _gauge(
        "outrider_replicas_attached",
        "Services that are attached.",
        "outrider_replicas_attached",
        _SIDE,
    ),
)

RECOVERY = (
    _counter(
        "outrider_requests_resumed_total",
        "Requests taken in that went on from the output of an interrupted call, here or at another coordinator.",
    ),
    _counter(
        "outrider_sessions_rebuilt_total",
        "Sessions brought to a service again from their first token, after the service or the session there was lost.",
        f"sum by (side) (rate(outrider_sessions_rebuilt_total{_WINDOW}))",
        _SIDE,
    ),
    _counter(
        "outrider_stale_replies_total",
        "Replies to commands that had been overtaken; they change nothing.",
        f"sum by (side) (rate(outrider_stale_replies_total{_WINDOW}))",
        _SIDE,
    ),
    _counter("outrider_draft_timeouts_total", "Steps that waited for the draft as long as they may, and went without."),
    _counter("outrider_bad_evidence_total", "Proposals that could not be judged: the draft broke the contract."),
)


def _of_services(kind: Kind, name: str, text: str, promql: str, *labels: Label) -> MetricSpec:
    return MetricSpec(name, kind, SERVICES, text, promql, (_ROLE, *labels))


SERVICE = (
    _of_services(
        Kind.HISTOGRAM,
        "outrider_forward_stage_seconds",
        "Stages in a service: how long an item waited for its first forward (queue), a forward's time in the model"
        " (forward) and in sampling or scoring (sample).",
        _quantile("outrider_forward_stage_seconds", "role, stage"),
        Label("stage", "queue, forward or sample"),
    ),
    _of_services(
        Kind.HISTOGRAM,
        "outrider_forward_batch_size",
        "Sequences in a forward.",
        f"sum by (role) (rate(outrider_forward_batch_size_sum{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_forward_batch_size_count{_WINDOW})) > 0)",
    ),
    _of_services(
        Kind.HISTOGRAM,
        "outrider_forward_tokens",
        "Tokens in a forward.",
        f"sum by (role) (rate(outrider_forward_tokens_sum{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_forward_tokens_count{_WINDOW})) > 0)",
    ),
    _of_services(
        Kind.GAUGE,
        "outrider_kv_pages_used",
        "KV pages that sessions hold.",
        "outrider_kv_pages_used / (outrider_kv_pages_used + outrider_kv_pages_free)",
    ),
    _of_services(
        Kind.GAUGE,
        "outrider_kv_pages_free",
        "KV pages that no session holds; cached ones are among them.",
        "min by (role) (outrider_kv_pages_free)",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_prefix_cache_queries_total",
        "Tokens of new and rebuilt sessions that were looked for in the prefix cache.",
        f"sum by (role) (rate(outrider_prefix_cache_hits_total{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_prefix_cache_queries_total{_WINDOW})) > 0)",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_prefix_cache_hits_total",
        "Tokens of those that were found there, and not computed again.",
        f"sum by (role) (rate(outrider_prefix_cache_hits_total{_WINDOW}))",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_prefix_cache_evictions_total",
        "Cached KV pages that were needed for other texts.",
        f"sum by (role) (rate(outrider_prefix_cache_evictions_total{_WINDOW}))",
    ),
    _of_services(
        Kind.GAUGE, "outrider_sessions_open", "Sessions that are open.", "sum by (role) (outrider_sessions_open)"
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_sessions_opened_total",
        "Sessions opened, those opened anew included.",
        f"sum by (role) (rate(outrider_sessions_opened_total{_WINDOW}))",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_sessions_refused_total",
        "Sessions refused.",
        f"sum by (role, reason) (rate(outrider_sessions_refused_total{_WINDOW}))",
        Label("reason", "no_room (too few pages are free) or ending (the service drains)"),
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_foreseen_items_total",
        "Items computed before they came (`compute_ahead`), by whether they came.",
        f"sum by (outcome) (rate(outrider_foreseen_items_total{_WINDOW}))",
        Label("outcome", "used or unused"),
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_sessions_preempted_total",
        "Sessions that ended because their pages were needed for older ones; their coordinators rebuild them.",
        f"sum by (role) (rate(outrider_sessions_preempted_total{_WINDOW}))",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_sessions_lost_total",
        "Items for a session that the service does not hold as far as the item says.",
        f"sum by (role) (rate(outrider_sessions_lost_total{_WINDOW}))",
    ),
    _of_services(
        Kind.COUNTER,
        "outrider_sessions_failed_total",
        "Sessions that could not go on, by the error's name in outrider/errors.py.",
        f"sum by (role, error) (rate(outrider_sessions_failed_total{_WINDOW}))",
        Label("error", "name of the error"),
    ),
    _of_services(
        Kind.GAUGE,
        "outrider_model_load_seconds",
        "How long reading the weights, sizing the pool and the warm-up took.",
        "outrider_model_load_seconds",
    ),
    _of_services(
        Kind.GAUGE,
        "outrider_graph_capture_seconds",
        "How much of that was capturing CUDA graphs; 0 without a GPU.",
        "outrider_graph_capture_seconds",
    ),
)

PROCESS = (
    MetricSpec(
        "outrider_build_info",
        Kind.GAUGE,
        EVERYBODY,
        "1; what runs.",
        "count by (role, version, commit, model) (outrider_build_info)",
        (
            Label("role", "coordinator, draft or target"),
            Label("version", "the package's"),
            Label("commit", "GIT_COMMIT of its environment, else that of its checkout, else empty"),
            Label("model", "the model's name; the coordinator's is the target's"),
        ),
    ),
)

SECTIONS: dict[str, tuple[MetricSpec, ...]] = {
    "Speculation": SPECULATION,
    "Latency": LATENCY,
    "Load": LOAD,
    "Recovery": RECOVERY,
    "Draft and target": SERVICE,
    "Process": PROCESS,
}

CATALOGUE: tuple[MetricSpec, ...] = tuple(spec for section in SECTIONS.values() for spec in section)


@cache
def find(name: str) -> MetricSpec:
    """The metric of this name; ``KeyError`` when there is none."""
    return {spec.name: spec for spec in CATALOGUE}[name]
