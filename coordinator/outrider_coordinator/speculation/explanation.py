"""Explanation of the mode of decoding, in words for ``outrider info`` and in figures for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.sessions import Mode

if TYPE_CHECKING:
    from outrider_coordinator.speculation.policy import DraftLengthPolicy


def draft_length_reason(policy: DraftLengthPolicy, *, is_draft_up: bool) -> str:
    """Reason why running sessions draft or do not; empty while none runs, and with fixed lengths.

    Of several targets, the one with the most sessions counts.
    """
    if not is_draft_up:
        return "draft unavailable"
    if policy.is_always_off:
        return "disabled by batch size: 1 turns drafts off for every request"
    if policy.is_off_by_load:
        return f"disabled by batch size: {policy.num_requests} requests run or wait"
    running = [controller for controller in policy.controllers.values() if controller.sessions]
    asking = [controller for controller in running if controller.sessions.may_draft]
    if not asking:
        return "no request asks for drafts" if running else ""
    return reason_of(max(asking, key=lambda controller: len(controller.sessions)))


def reason_of(controller: DraftLengthController) -> str:
    """Expected tokens and milliseconds of a round of both modes, and which estimate decided."""
    expected, count = controller.expectation, len(controller.sessions)
    sessions = f"{count} session" + "s" * (count != 1)
    if not expected.rates[Mode.PLAIN] or not expected.rates[Mode.SPECULATIVE]:
        return f"drafting has not been considered yet with {sessions}"
    plain, speculative = (
        f"{tokens:.1f} tokens in {1e3 * seconds:.1f} ms"
        for tokens, seconds in (expected.rounds[mode] for mode in (Mode.PLAIN, Mode.SPECULATIVE))
    )
    ratio = expected.rates[Mode.SPECULATIVE] / expected.rates[Mode.PLAIN]
    is_on, pays = controller.is_speculating, ratio >= 1.0
    verdict = "drafting pays" if pays else "drafting does not pay"
    if is_on != pays:  # too close for a change
        verdict = "drafting goes on" if is_on else "drafting stays off"
    return (
        f"{verdict}: expected {ratio:.2f} of plain at K={expected.length} with {sessions}"
        f" ({speculative}; plain {plain}), by {_source(controller)}"
    )


def _source(controller: DraftLengthController) -> str:
    """Source of the estimate of speculation."""
    if controller.is_measured:
        return "rounds that were measured"
    return (
        "the services' step costs" if controller.costs.has_profile else "usual step costs: the services measured none"
    )


def log_fields(target: object, controller: DraftLengthController) -> dict[str, object]:
    """Figures of the last choice for the log; times in milliseconds."""
    expected = controller.expectation
    found: dict[str, object] = {
        "sessions": len(controller.sessions),
        "draft_length": round(controller.sessions.mean_length, 2),
        "acceptance": round(controller.acceptance.mean, 3),
        "target": str(target),
        "speculation_is_measured": controller.is_measured,
        "has_profile": controller.costs.has_profile,
        "lacked_tokens": controller.sessions.num_uncomputed,
        "lacked_ms": round(1e3 * expected.text_seconds(controller.sessions.num_uncomputed), 2),
    }
    for mode, (tokens, seconds) in expected.rounds.items():
        found[f"{mode}_tokens_per_s"] = round(expected.rates[mode], 1)
        found |= {f"{mode}_tokens": round(tokens, 2), f"{mode}_ms": round(1e3 * seconds, 2)}
    return found
