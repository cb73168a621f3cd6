"""Explanation of the mode of decoding, in words for ``outrider info``."""

from __future__ import annotations

from outrider_coordinator.speculation.policy import DraftLengthPolicy


def why_not_drafting(policy: DraftLengthPolicy, *, is_draft_up: bool) -> str:
    """Why no running session drafts; empty while some do, or while none runs that a draft could serve.

    Where targets differ, the one with the most sessions counts.
    """
    if not is_draft_up:
        return "draft unavailable"
    if policy.is_always_off:
        return "disabled by batch size: 1 turns drafts off for every request"
    if policy.is_off_by_load:
        return f"disabled by batch size: {policy.num_requests} requests run or wait"
    running = [controller for controller in policy.controllers if controller.num_sessions]
    asking = [controller for controller in running if controller.may_draft]
    if not asking:
        return "no request asks for drafts" if running else ""
    if any(controller.is_speculating for controller in asking):
        return ""
    return max(asking, key=lambda controller: controller.num_sessions).reason
