"""Metrics under vLLM's names where the meaning is the same, for inference gateways and dashboards made for vLLM.

Names and labels are those of vLLM 0.33 (``vllm/v1/metrics/loggers.py``, ``vllm/v1/spec_decode/metrics.py``). The
coordinator serves those of requests and speculation, a target those of its KV cache. A draft serves none, because sums
over all processes would count it as a second model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider.readings import HistogramReading, Reading


@dataclass(frozen=True, slots=True)
class VllmName:
    """One metric of vLLM."""

    name: str
    """Name without the suffix that a counter's samples have."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Our label -> vLLM's."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Our value of a label -> vLLM's, where they differ. Figures of one value of vLLM's are added up."""


ENGINE = "0"
"""vLLM numbers the engines of a process; here there is one."""

_SPECULATION = "outrider_spec_decode_num_"
_KV_CACHE_USAGE = {"outrider_kv_cache_usage_perc": VllmName("vllm:kv_cache_usage_perc")}
_OF_COORDINATOR = {
    **_KV_CACHE_USAGE,
    "outrider_num_requests_running": VllmName("vllm:num_requests_running"),
    "outrider_num_requests_waiting": VllmName("vllm:num_requests_waiting"),
    "outrider_prompt_tokens_total": VllmName("vllm:prompt_tokens"),
    f"{_SPECULATION}emitted_tokens_total": VllmName("vllm:generation_tokens"),
    "outrider_requests_total": VllmName(
        "vllm:request_success",
        {"outcome": "finished_reason"},
        {"cancelled": "abort", "deadline": "abort", "failed": "error"},
    ),
    "outrider_request_prompt_tokens": VllmName("vllm:request_prompt_tokens"),
    "outrider_request_generation_tokens": VllmName("vllm:request_generation_tokens"),
    "outrider_time_to_first_token_seconds": VllmName("vllm:time_to_first_token_seconds"),
    "outrider_inter_token_latency_seconds": VllmName("vllm:inter_token_latency_seconds"),
    "outrider_request_time_per_output_token_seconds": VllmName("vllm:request_time_per_output_token_seconds"),
    "outrider_e2e_request_latency_seconds": VllmName("vllm:e2e_request_latency_seconds"),
    "outrider_request_queue_time_seconds": VllmName("vllm:request_queue_time_seconds"),
    f"{_SPECULATION}drafts_total": VllmName("vllm:spec_decode_num_drafts"),
    f"{_SPECULATION}draft_tokens_total": VllmName("vllm:spec_decode_num_draft_tokens"),
    f"{_SPECULATION}accepted_tokens_total": VllmName("vllm:spec_decode_num_accepted_tokens"),
    f"{_SPECULATION}accepted_tokens_per_pos_total": VllmName(
        "vllm:spec_decode_num_accepted_tokens_per_pos", {"position": "position"}
    ),
}
_OF_TARGET = {
    **_KV_CACHE_USAGE,
    "outrider_prefix_cache_queries_total": VllmName("vllm:prefix_cache_queries"),
    "outrider_prefix_cache_hits_total": VllmName("vllm:prefix_cache_hits"),
    "outrider_sessions_preempted_total": VllmName("vllm:num_preemptions"),
}
VLLM_NAMES: dict[str, dict[str, VllmName]] = {"coordinator": _OF_COORDINATOR, "target": _OF_TARGET}
"""Role of a process -> our name -> vLLM's."""


def vllm_readings(readings: Iterable[Reading], role: str) -> dict[str, list[Reading]]:
    """Readings of a process under vLLM's names and labels, by their names here."""
    given = list(readings)
    model = next((dict(found.labels)["model"] for found in given if found.name == "outrider_build_info"), "")
    names = VLLM_NAMES.get(role, {})
    found: dict[str, list[Reading]] = {}
    for reading in given:
        if reading.name in names:
            found.setdefault(reading.name, []).append(_renamed(reading, names[reading.name], model))
    return {name: _added_up(readings) for name, readings in found.items()}


def _renamed(reading: Reading, vllm: VllmName, model: str) -> Reading:
    own = tuple((vllm.labels[label], vllm.values.get(value, value)) for label, value in reading.labels)
    return Reading(vllm.name, reading.value, (("model_name", model), ("engine", ENGINE), *own))


def _added_up(readings: Iterable[Reading]) -> list[Reading]:
    """One reading for each set of labels: the sum, of a histogram the last."""
    sums: dict[tuple[tuple[str, str], ...], Reading] = {}
    for reading in readings:
        before = sums[reading.labels].value if reading.labels in sums else 0.0
        if isinstance(reading.value, HistogramReading) or isinstance(before, HistogramReading):
            sums[reading.labels] = reading
        else:
            sums[reading.labels] = replace(reading, value=before + reading.value)
    return list(sums.values())
