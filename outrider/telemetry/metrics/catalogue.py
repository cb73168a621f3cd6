"""Catalogue of metrics: name, kind, meaning, labels, and a typical PromQL expression.

``docs/metrics.md`` is generated from it, and the endpoint takes names and help texts from it. Tests compare the
dashboard, the alert rules and the served metrics with it. ``vllm_names`` has vLLM's names. No Prometheus package is
imported.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache


class MetricKind(enum.Enum):
    """Prometheus' type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric."""

    name: str
    text: str
    """Values of the label."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    kind: MetricKind
    roles: tuple[str, ...]
    """Processes that serve it."""
    text: str
    """Meaning, as Prometheus' help text gives it."""
    promql: str
    """An expression that it is read with."""
    labels: tuple[Label, ...] = ()


COORDINATOR = ("coordinator",)
SERVICES = ("draft", "target")
EVERYBODY = ("coordinator", "draft", "target")
GATEWAY = ("gateway",)

_ROLE = Label("role", "draft or target")
_SIDE = Label("side", "draft or target")
_REASON_NOT = Label(
    "reason",
    "prefill, not_asked, load, not_worth, prompts, draft_prefill, last_token, outgrown, late, away, refused, lost,"
    " failed, bad_evidence, forced, nothing_proposed",
)
_WINDOW = "[$__rate_interval]"


def _rate(name: str) -> str:
    return f"sum(rate({name}{_WINDOW}))"


def _quantile(name: str, by: str = "") -> str:
    grouping = f", {by}" if by else ""
    return f"histogram_quantile(0.99, sum by (le{grouping}) (rate({name}_bucket{_WINDOW})))"


def _counter(name: str, text: str, promql: str = "", *labels: Label) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, COORDINATOR, text, promql or _rate(name), labels)


def _gauge(name: str, text: str, promql: str = "", *labels: Label) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, COORDINATOR, text, promql or f"sum({name})", labels)


def _histogram(name: str, text: str, *labels: Label) -> MetricSpec:
    by = ", ".join(label.name for label in labels)
    return MetricSpec(name, MetricKind.HISTOGRAM, COORDINATOR, text, _quantile(name, by), labels)


_ACCEPTED = _rate("outrider_spec_decode_num_accepted_tokens_total")
_DRAFTS = _rate("outrider_spec_decode_num_drafts_total")
_DRAFTED = _rate("outrider_spec_decode_num_draft_tokens_total")
_STEPS = _rate("outrider_steps_total")
_DRAFT_MODEL = Label("draft_model", "name of the draft's model")

SPECULATION = (
    _counter("outrider_steps_total", "Judged steps of all sessions, prefills included."),
    _counter(
        "outrider_spec_decode_num_drafts_total",
        "Steps with a proposal. Divided by all steps: the share of steps that speculate.",
        f"{_DRAFTS} / ({_STEPS} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_draft_tokens_total",
        "Draft tokens proposed. With it, the system efficiency of vLLM is (accepted tokens + drafts) / (draft tokens +"
        " drafts): the tokens gained in steps with a proposal, divided by those that full acceptance would gain.",
        f"({_ACCEPTED} + {_DRAFTS}) / ({_DRAFTED} + {_DRAFTS} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted. Divided by draft tokens: the acceptance rate. Divided by drafts, plus 1: the mean"
        " acceptance length.",
        f"{_ACCEPTED} / ({_DRAFTED} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_judged_tokens_total",
        "Draft tokens judged: all but those after the first rejection of their step. Accepted tokens divided by judged"
        " tokens: the acceptance rate of judged tokens.",
        f"{_ACCEPTED} / ({_rate('outrider_spec_decode_num_judged_tokens_total')} > 0)",
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by position in the proposal.",
        f"sum by (position) (rate(outrider_spec_decode_num_accepted_tokens_per_pos_total{_WINDOW}))"
        f" / ignoring(position) group_left () ({_DRAFTS} > 0)",
        Label("position", "0 for the first draft token"),
    ),
    _counter(
        "outrider_draft_model_draft_tokens_total",
        "Draft tokens proposed, by the model that drew them: versions of a draft beside each other, where their names"
        " (served_model_name) differ.",
        f"sum by (draft_model) (rate(outrider_draft_model_draft_tokens_total{_WINDOW}))",
        _DRAFT_MODEL,
    ),
    _counter(
        "outrider_draft_model_accepted_tokens_total",
        "Draft tokens accepted, by the model that drew them.",
        f"sum by (draft_model) (rate(outrider_draft_model_accepted_tokens_total{_WINDOW}))"
        f" / (sum by (draft_model) (rate(outrider_draft_model_draft_tokens_total{_WINDOW})) > 0)",
        _DRAFT_MODEL,
    ),
    _counter(
        "outrider_spec_decode_num_emitted_tokens_total",
        "Output tokens sent to users.",
    ),
    _counter(
        "outrider_steps_without_draft_total",
        "Steps without a proposal, by reason.",
        f"sum by (reason) (rate(outrider_steps_without_draft_total{_WINDOW}))",
        _REASON_NOT,
    ),
    _counter(
        "outrider_forced_tokens_total",
        "Tokens that grammars force, proposed without a draft. They count as no draft tokens.",
    ),
    _counter(
        "outrider_accepted_forced_tokens_total",
        "Forced tokens that were accepted.",
        f"{_rate('outrider_accepted_forced_tokens_total')} / ({_rate('outrider_forced_tokens_total')} > 0)",
    ),
    _gauge(
        "outrider_draft_length",
        "Mean draft length of running sessions; 0: they decode without speculation. While none runs: that with which"
        " the next one would begin.",
        "avg(outrider_draft_length)",
    ),
    _gauge(
        "outrider_expected_tokens_per_second",
        "Expected throughput of all sessions in tokens per second, without and with speculation. It determines the"
        " draft length.",
        "sum by (mode) (outrider_expected_tokens_per_second)",
        Label("mode", "plain or speculative"),
    ),
    _counter("outrider_draft_length_mode_changes_total", "Changes between decoding without and with speculation."),
    _counter(
        "outrider_draft_length_probes_total",
        "Probes: some sessions draft while speculation is off, to measure whether it pays again.",
    ),
)

LATENCY = (
    _histogram("outrider_time_to_first_token_seconds", "Time from the arrival of a request to its first output."),
    _histogram(
        "outrider_inter_token_latency_seconds",
        "Time between two messages with output of a request. A message has one token, or several with a draft.",
    ),
    _histogram(
        "outrider_request_time_per_output_token_seconds",
        "Time of a request after its first output, divided by the tokens after the first.",
    ),
    _histogram(
        "outrider_e2e_request_latency_seconds", "Time from the arrival of a request to its end, whatever the outcome."
    ),
    _histogram("outrider_request_queue_time_seconds", "Time that a request waited in the queue or for KV pages."),
    _histogram(
        "outrider_step_stage_seconds",
        "Time of the stages of a step, measured by the coordinator: in the draft (draft), in the target (score), of"
        " judging (accept), and the rest of each wait for a service (wire). Prefill is a request's first step and every"
        " later one in which the target takes in the whole text again; all others are decode.",
        Label("phase", "prefill or decode"),
        Label("stage", "draft, score, accept or wire"),
    ),
)

LOAD = (
    _gauge("outrider_num_requests_running", "Running requests."),
    _gauge("outrider_num_requests_waiting", "Requests that wait in the queue or for KV pages."),
    _gauge(
        "outrider_num_requests_paused",
        "Requests without KV pages until their callers read their streams on; neither running nor waiting.",
    ),
    _counter(
        "outrider_request_pauses_total",
        "Pauses of requests whose callers do not read their streams. After one second a pause releases the KV pages.",
    ),
    _counter(
        "outrider_requests_total",
        "Requests that have ended, by outcome. A request that exceeded its deadline has not failed.",
        f"sum by (outcome) (rate(outrider_requests_total{_WINDOW}))",
        Label("outcome", "stop, length, cancelled, deadline or failed"),
    ),
    _counter(
        "outrider_requests_failed_total",
        "Requests that failed, by the name of the error in outrider/errors.py.",
        f"sum by (error) (rate(outrider_requests_failed_total{_WINDOW}))",
        Label("error", "name of the error"),
    ),
    _counter(
        "outrider_requests_refused_total",
        "Requests that were refused, by reason.",
        f"sum by (reason) (rate(outrider_requests_refused_total{_WINDOW}))",
        Label("reason", "queue_full, invalid or unavailable"),
    ),
    _counter("outrider_prompt_tokens_total", "Prompt tokens of admitted requests."),
    _histogram("outrider_request_prompt_tokens", "Prompt length of requests that have ended, in tokens."),
    _histogram("outrider_request_generation_tokens", "Output length of requests that have ended, in tokens."),
    _gauge(
        "outrider_replicas_attached",
        "Attached replicas of the draft and the target.",
        "outrider_replicas_attached",
        _SIDE,
    ),
    _counter(
        "outrider_replicas_hung_total",
        "Links to replicas that were closed because the replica hung, or never answered an item.",
        "sum by (side) (increase(outrider_replicas_hung_total[1h]))",
        _SIDE,
    ),
    _gauge(
        "outrider_tensor_planes",
        "Pairs of a target and a draft that reads its hidden states, by the tensor plane that the states take.",
        "outrider_tensor_planes",
        Label("plane", "cuda_ipc, nccl, shared_memory, gloo or inline"),
    ),
    _gauge(
        "outrider_proposal_channels",
        "Pairs of a draft and a target between which proposals go directly.",
        "outrider_proposal_channels",
    ),
    _gauge(
        "outrider_proposal_channels_ahead",
        "Proposal channels whose draft and target go on by themselves (`draft_ahead`).",
        "outrider_proposal_channels_ahead",
    ),
    _counter(
        "outrider_drafts_ahead_total",
        "Proposals that were begun before they were asked for, of `outrider_spec_decode_num_drafts_total`.",
        f"{_rate('outrider_drafts_ahead_total')} / ({_DRAFTS} > 0)",
    ),
)

RECOVERY = (
    _counter(
        "outrider_requests_resumed_total",
        "Requests that resumed from the output of an interrupted call, at this coordinator or another.",
    ),
    _counter(
        "outrider_sessions_rebuilt_total",
        "Sessions rebuilt from their first token, after the service or its session was lost.",
        f"sum by (side) (rate(outrider_sessions_rebuilt_total{_WINDOW}))",
        _SIDE,
    ),
    _counter(
        "outrider_stale_replies_total",
        "Replies to commands that a newer command had replaced. They are dropped.",
        f"sum by (side) (rate(outrider_stale_replies_total{_WINDOW}))",
        _SIDE,
    ),
    _counter(
        "outrider_draft_timeouts_total",
        "Steps that waited for a proposal until `draft_timeout_ms` and continued without.",
    ),
    _counter("outrider_bad_evidence_total", "Proposals that violate the protocol and cannot be judged."),
)

GRAMMARS = (
    MetricSpec(
        "outrider_grammar_compile_seconds",
        MetricKind.HISTOGRAM,
        COORDINATOR,
        "Time to compile a grammar that was not cached.",
        _quantile("outrider_grammar_compile_seconds", ""),
    ),
    _counter("outrider_grammar_failures_total", "Grammars that were refused."),
    MetricSpec(
        "outrider_grammar_mask_seconds",
        MetricKind.HISTOGRAM,
        ("target",),
        "Time to compute the mask of one position of one session with a grammar.",
        _quantile("outrider_grammar_mask_seconds", ""),
    ),
)


def _of_services(kind: MetricKind, name: str, text: str, promql: str, *labels: Label) -> MetricSpec:
    return MetricSpec(name, kind, SERVICES, text, promql, (_ROLE, *labels))


SERVICE = (
    _of_services(
        MetricKind.HISTOGRAM,
        "outrider_forward_stage_seconds",
        "Time of the stages in a service: of an item until its first forward (queue), of a forward in the model"
        " (forward), and of sampling or scoring (sample).",
        _quantile("outrider_forward_stage_seconds", "role, stage"),
        Label("stage", "queue, forward or sample"),
    ),
    _of_services(
        MetricKind.HISTOGRAM,
        "outrider_forward_batch_size",
        "Sequences in a forward.",
        f"sum by (role) (rate(outrider_forward_batch_size_sum{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_forward_batch_size_count{_WINDOW})) > 0)",
    ),
    _of_services(
        MetricKind.HISTOGRAM,
        "outrider_forward_tokens",
        "Tokens in a forward.",
        f"sum by (role) (rate(outrider_forward_tokens_sum{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_forward_tokens_count{_WINDOW})) > 0)",
    ),
    _of_services(
        MetricKind.GAUGE,
        "outrider_kv_pages_used",
        "KV pages that sessions hold.",
        "sum by (role) (outrider_kv_pages_used)",
    ),
    _of_services(
        MetricKind.GAUGE,
        "outrider_kv_pages_free",
        "KV pages that no session holds, cached pages included.",
        "min by (role) (outrider_kv_pages_free)",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_prefix_cache_queries_total",
        "Tokens of new and rebuilt sessions that were looked up in the prefix cache.",
        f"sum by (role) (rate(outrider_prefix_cache_hits_total{_WINDOW}))"
        f" / (sum by (role) (rate(outrider_prefix_cache_queries_total{_WINDOW})) > 0)",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_prefix_cache_hits_total",
        "Tokens found in the prefix cache, which are not computed again.",
        f"sum by (role) (rate(outrider_prefix_cache_hits_total{_WINDOW}))",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_prefix_cache_evictions_total",
        "Cached KV pages that were evicted for other sequences.",
        f"sum by (role) (rate(outrider_prefix_cache_evictions_total{_WINDOW}))",
    ),
    _of_services(
        MetricKind.GAUGE, "outrider_sessions_open", "Sessions that are open.", "sum by (role) (outrider_sessions_open)"
    ),
    _of_services(
        MetricKind.GAUGE,
        "outrider_stall_seconds",
        "Age of the oldest forward in flight, or of the oldest runnable item where none is; 0 while there is progress."
        " At hang_timeout_s the process ends.",
        "max by (role) (outrider_stall_seconds)",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_sessions_opened_total",
        "Sessions opened, rebuilt ones included.",
        f"sum by (role) (rate(outrider_sessions_opened_total{_WINDOW}))",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_sessions_refused_total",
        "Sessions refused, by reason.",
        f"sum by (role, reason) (rate(outrider_sessions_refused_total{_WINDOW}))",
        Label("reason", "no_room (too few pages are free) or ending (the service drains)"),
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_lookahead_steps_total",
        "Steps computed before they were asked for, by whether they were used: plain steps of a target"
        " (`compute_ahead`), proposals of a draft and a target's steps with them (`draft_ahead`).",
        f"sum by (role, outcome) (rate(outrider_lookahead_steps_total{_WINDOW}))",
        Label("outcome", "used or unused"),
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_sessions_preempted_total",
        "Sessions preempted because older sessions needed their KV pages. The coordinator rebuilds them.",
        f"sum by (role) (rate(outrider_sessions_preempted_total{_WINDOW}))",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_sessions_lost_total",
        "Items for sessions that hold fewer tokens than the item assumes. The coordinator rebuilds them.",
        f"sum by (role) (rate(outrider_sessions_lost_total{_WINDOW}))",
    ),
    _of_services(
        MetricKind.COUNTER,
        "outrider_sessions_failed_total",
        "Sessions that failed, by the name of the error in outrider/errors.py.",
        f"sum by (role, error) (rate(outrider_sessions_failed_total{_WINDOW}))",
        Label("error", "name of the error"),
    ),
    MetricSpec(
        "outrider_hidden_state_bytes_total",
        MetricKind.COUNTER,
        ("target",),
        "Bytes of hidden states handed over to drafts, by the tensor plane that they took.",
        f"sum by (plane) (rate(outrider_hidden_state_bytes_total{_WINDOW}))",
        (_ROLE, Label("plane", "cuda_ipc, nccl, shared_memory, gloo or inline")),
    ),
    MetricSpec(
        "outrider_direct_proposals_total",
        MetricKind.COUNTER,
        ("draft",),
        "Messages with proposals that went to a target directly, by a proposal channel.",
        _rate("outrider_direct_proposals_total"),
        (_ROLE,),
    ),
    MetricSpec(
        "outrider_stale_references_total",
        MetricKind.COUNTER,
        ("draft",),
        "Hidden states that were not on the tensor plane any more when they were to be read. The coordinator rebuilds"
        " the session on the draft.",
        _rate("outrider_stale_references_total"),
        (_ROLE,),
    ),
    _of_services(
        MetricKind.GAUGE,
        "outrider_model_load_seconds",
        "Duration of the last start: reading the weights, sizing the KV cache, warming up.",
        "outrider_model_load_seconds",
    ),
    _of_services(
        MetricKind.GAUGE,
        "outrider_graph_capture_seconds",
        "Part of the start that captured CUDA graphs; 0 without a GPU.",
        "outrider_graph_capture_seconds",
    ),
)

KV_CACHE_USAGE = MetricSpec(
    "outrider_kv_cache_usage_perc",
    MetricKind.GAUGE,
    EVERYBODY,
    "Fraction of the KV pages in use, from 0 to 1; for a coordinator, over its attached targets.",
    "max by (role) (outrider_kv_cache_usage_perc)",
    (Label("role", "coordinator, draft or target"),),
)

PROCESS = (
    KV_CACHE_USAGE,
    MetricSpec(
        "outrider_build_info",
        MetricKind.GAUGE,
        (*EVERYBODY, *GATEWAY),
        "Always 1; the labels describe the process.",
        "count by (role, version, commit, model) (outrider_build_info)",
        (
            Label("role", "coordinator, draft, target or gateway"),
            Label("version", "the package's"),
            Label("commit", "the variable GIT_COMMIT, else the commit of the checkout, else empty"),
            Label("model", "name of the model; of a coordinator, the target's; of a gateway, `served_model_name`"),
        ),
    ),
)

_PATH = Label("path", "path of the API, or other")

HTTP = (
    MetricSpec(
        "outrider_http_requests_total",
        MetricKind.COUNTER,
        GATEWAY,
        "HTTP requests that ended. Status 499: the client left before there was an answer.",
        f"sum by (path, status) (rate(outrider_http_requests_total{_WINDOW}))",
        (_PATH, Label("status", "status of the answer")),
    ),
    MetricSpec(
        "outrider_http_requests_running",
        MetricKind.GAUGE,
        GATEWAY,
        "HTTP requests being answered.",
        "sum(outrider_http_requests_running)",
    ),
    MetricSpec(
        "outrider_http_request_seconds",
        MetricKind.HISTOGRAM,
        GATEWAY,
        "Time of generation requests over HTTP, streams to their end.",
        _quantile("outrider_http_request_seconds", "path"),
        (_PATH,),
    ),
    MetricSpec(
        "outrider_http_first_byte_seconds",
        MetricKind.HISTOGRAM,
        GATEWAY,
        "Time from a generation request to the first byte of its answer: of a stream, to its first event.",
        _quantile("outrider_http_first_byte_seconds", "path"),
        (_PATH,),
    ),
)

SECTIONS: dict[str, tuple[MetricSpec, ...]] = {
    "Speculation": SPECULATION,
    "Latency": LATENCY,
    "Load": LOAD,
    "Recovery": RECOVERY,
    "Grammars": GRAMMARS,
    "Draft and target": SERVICE,
    "HTTP gateway": HTTP,
    "All processes": PROCESS,
}

CATALOGUE: tuple[MetricSpec, ...] = tuple(spec for section in SECTIONS.values() for spec in section)


@cache
def find(name: str) -> MetricSpec:
    """The metric of this name; ``KeyError`` when there is none."""
    return {spec.name: spec for spec in CATALOGUE}[name]
