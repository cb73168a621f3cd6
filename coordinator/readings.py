"""A coordinator's figures under the names they have in the catalogue of metrics."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.meter import Meter
from coordinator.roster import Roster
from coordinator.services import Services
from coordinator.sides import WithoutDraft
from coordinator.speculation import DraftLengthPolicy, Mode
from coordinator.tally import Tally
from outrider import __version__
from outrider.readings import Reading, each
from outrider.telemetry.metrics.serving import build_info
from outrider.types import FinishReason


def coordinator_readings(
    roster: Roster, services: Services, meter: Meter, refusals: Mapping[str, int]
) -> list[Reading]:
    """All of them, at this moment; to be taken on the event loop, where nothing is half done."""
    return [
        Reading("outrider_num_requests_running", roster.num_running),
        Reading("outrider_num_requests_waiting", roster.num_waiting),
        *_endings(roster),
        *each("outrider_requests_refused_total", "reason", refusals.items()),
        *each("outrider_replicas_attached", "side", _attached(services)),
        *speculation_readings(roster.tally()),
        *draft_length_readings(roster.policy),
        build_info(_model_name(services), __version__),
        *meter.readings(),
    ]


def speculation_readings(tally: Tally) -> list[Reading]:
    """What speculation did."""
    prefix = "outrider_spec_decode_num_"
    positions = enumerate(tally.accepted_per_position())
    return [
        Reading("outrider_steps_total", tally.num_steps),
        Reading(f"{prefix}drafts_total", tally.num_drafts),
        Reading(f"{prefix}draft_tokens_total", tally.num_draft_tokens),
        Reading(f"{prefix}accepted_tokens_total", tally.num_accepted_tokens),
        Reading(f"{prefix}judged_tokens_total", tally.num_judged_tokens),
        Reading(f"{prefix}emitted_tokens_total", tally.num_emitted_tokens),
        *each(f"{prefix}accepted_tokens_per_pos_total", "position", [(str(place), n) for place, n in positions]),
        *each(
            "outrider_steps_without_draft_total",
            "reason",
            [(reason.value, tally.without_draft[reason]) for reason in WithoutDraft],
        ),
        *each("outrider_sessions_rebuilt_total", "side", _sides(tally.num_draft_rebuilds, tally.num_target_rebuilds)),
        *each(
            "outrider_stale_replies_total",
            "side",
            _sides(tally.num_stale_draft_replies, tally.num_stale_target_replies),
        ),
        Reading("outrider_draft_timeouts_total", tally.num_draft_timeouts),
        Reading("outrider_bad_evidence_total", tally.num_bad_evidence),
    ]


def draft_length_readings(policy: DraftLengthPolicy) -> list[Reading]:
    """What the draft lengths are, and what led to them."""
    controllers = policy.controllers
    rates = {
        Mode.PLAIN.value: sum(found.plain_rate for found in controllers if found.num_sessions),
        Mode.SPECULATIVE.value: sum(found.speculative_rate for found in controllers if found.num_sessions),
    }
    return [
        Reading("outrider_draft_length", policy.mean_length),
        *each("outrider_expected_tokens_per_second", "mode", rates.items()),
        Reading("outrider_draft_length_mode_changes_total", sum(found.num_switches for found in controllers)),
        Reading("outrider_draft_length_probes_total", sum(found.num_probes for found in controllers)),
    ]


def _endings(roster: Roster) -> list[Reading]:
    endings = roster.endings
    outcomes = {**{reason.value: endings.by_reason[reason] for reason in FinishReason}, "failed": endings.num_failed}
    return [
        Reading("outrider_prompt_tokens_total", endings.num_prompt_tokens),
        Reading("outrider_requests_resumed_total", endings.num_resumed),
        *each("outrider_requests_total", "outcome", outcomes.items()),
        *each("outrider_requests_failed_total", "error", endings.by_error.items()),
    ]


def _model_name(services: Services) -> str:
    return next((description.model_name for description in services.target.descriptions), "")


def _attached(services: Services) -> list[tuple[str, float]]:
    sides = [("target", float(len(services.target.attached)))]
    return sides if services.draft is None else [*sides, ("draft", float(len(services.draft.attached)))]


def _sides(draft: int, target: int) -> list[tuple[str, float]]:
    return [("draft", draft), ("target", target)]
