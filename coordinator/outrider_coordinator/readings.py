"""Readings of a coordinator under the names of the metrics catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from outrider import __version__
from outrider.planes import PlaneKind
from outrider.readings import Reading, each
from outrider.telemetry.metrics.serving import build_info
from outrider.types import FinishReason
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.routing.services import Services
from outrider_coordinator.speculation import DraftLengthPolicy, Mode
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats, WithoutDraft


def coordinator_readings(
    request_manager: RequestManager,
    services: Services,
    latency_histograms: LatencyHistograms,
    refusals: Mapping[str, int],
) -> list[Reading]:
    """All current readings; called on the event loop, between events."""
    return [
        Reading("outrider_num_requests_running", len(request_manager.admission.running)),
        Reading("outrider_num_requests_waiting", len(request_manager.admission.waiting)),
        Reading("outrider_num_requests_paused", len(request_manager.admission.paused)),
        *_endings(request_manager),
        *each("outrider_requests_refused_total", "reason", refusals.items()),
        *each("outrider_replicas_attached", "side", _attached(services)),
        *each("outrider_replicas_hung_total", "side", _hung(services)),
        *each("outrider_tensor_planes", "plane", _planes(services)),
        Reading("outrider_proposal_channels", services.peers.channels.num_open),
        Reading("outrider_proposal_channels_ahead", services.peers.channels.num_ahead),
        Reading("outrider_kv_cache_usage_perc", services.target.kv_cache_usage),
        *speculation_readings(request_manager.spec_stats()),
        *draft_length_readings(request_manager.policy),
        build_info(_model_name(services), __version__),
        *latency_histograms.readings(),
    ]


def speculation_readings(spec_stats: SpecDecodeStats) -> list[Reading]:
    """Readings of speculation."""
    prefix = "outrider_spec_decode_num_"
    positions = enumerate(spec_stats.accepted_per_position())
    return [
        Reading("outrider_steps_total", spec_stats.num_steps),
        Reading(f"{prefix}drafts_total", spec_stats.num_drafts),
        Reading(f"{prefix}draft_tokens_total", spec_stats.num_draft_tokens),
        Reading(f"{prefix}accepted_tokens_total", spec_stats.num_accepted_tokens),
        Reading(f"{prefix}judged_tokens_total", spec_stats.num_judged_tokens),
        Reading(f"{prefix}emitted_tokens_total", spec_stats.num_emitted_tokens),
        *each(f"{prefix}accepted_tokens_per_pos_total", "position", [(str(place), n) for place, n in positions]),
        *each("outrider_draft_model_draft_tokens_total", "draft_model", spec_stats.draft_tokens_by_model.items()),
        *each("outrider_draft_model_accepted_tokens_total", "draft_model", _accepted(spec_stats).items()),
        *each(
            "outrider_steps_without_draft_total",
            "reason",
            [(reason.value, spec_stats.without_draft[reason]) for reason in WithoutDraft],
        ),
        Reading("outrider_forced_tokens_total", spec_stats.num_forced_tokens),
        Reading("outrider_accepted_forced_tokens_total", spec_stats.num_accepted_forced_tokens),
        *each(
            "outrider_sessions_rebuilt_total",
            "side",
            _sides(spec_stats.num_draft_rebuilds, spec_stats.num_target_rebuilds),
        ),
        *each(
            "outrider_stale_replies_total",
            "side",
            _sides(spec_stats.num_stale_draft_replies, spec_stats.num_stale_target_replies),
        ),
        Reading("outrider_draft_timeouts_total", spec_stats.num_draft_timeouts),
        Reading("outrider_bad_evidence_total", spec_stats.num_bad_evidence),
    ]


def _accepted(spec_stats: SpecDecodeStats) -> dict[str, int]:
    """Accepted tokens by draft model, 0 included."""
    return {model: spec_stats.accepted_tokens_by_model[model] for model in spec_stats.draft_tokens_by_model}


def draft_length_readings(policy: DraftLengthPolicy) -> list[Reading]:
    """Readings of draft lengths and of the estimates that determine them."""
    controllers = policy.controllers.values()
    rates = {mode.value: sum(found.expectation.rates[mode] for found in controllers if found.sessions) for mode in Mode}
    return [
        Reading("outrider_draft_length", policy.mean_length),
        *each("outrider_expected_tokens_per_second", "mode", rates.items()),
        Reading(
            "outrider_draft_length_mode_changes_total", sum(found.comparison.num_switches for found in controllers)
        ),
        Reading("outrider_draft_length_probes_total", sum(found.probe.num_probes for found in controllers)),
    ]


def _endings(request_manager: RequestManager) -> list[Reading]:
    endings = request_manager.endings
    outcomes = {
        **{reason.value: endings.by_reason[reason] for reason in FinishReason},
        "deadline": endings.num_expired,
        "failed": endings.num_failed,
    }
    return [
        Reading("outrider_prompt_tokens_total", endings.num_prompt_tokens),
        Reading("outrider_request_prompt_tokens", endings.prompt_lengths.read()),
        Reading("outrider_request_generation_tokens", endings.generation_lengths.read()),
        Reading("outrider_requests_resumed_total", endings.num_resumed),
        Reading("outrider_request_pauses_total", endings.num_pauses),
        *each("outrider_requests_total", "outcome", outcomes.items()),
        *each("outrider_requests_failed_total", "error", endings.by_error.items()),
    ]


def _model_name(services: Services) -> str:
    return next((description.model_name for description in services.target.descriptions), "")


def _attached(services: Services) -> list[tuple[str, float]]:
    sides = [("target", float(len(services.target.attached)))]
    return sides if services.draft is None else [*sides, ("draft", float(len(services.draft.attached)))]


def _hung(services: Services) -> list[tuple[str, float]]:
    return _sides(services.draft.num_hangs if services.draft is not None else 0, services.target.num_hangs)


def _sides(draft: int, target: int) -> list[tuple[str, float]]:
    return [("draft", draft), ("target", target)]


def _planes(services: Services) -> list[tuple[str, float]]:
    used = [report.kind for report in services.peers.planes.reports()]
    return [(str(kind), used.count(kind)) for kind in PlaneKind]
