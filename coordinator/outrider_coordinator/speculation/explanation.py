"""Explanation of plain decoding: why nothing is drafted at present, in words for ``outrider info``.

Knows what the policy and its controllers decided; whether a draft is attached is told.
"""

from __future__ import annotations

from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.mode_selector import Mode
from outrider_coordinator.speculation.policy import DraftLengthPolicy


def why_not_drafting(policy: DraftLengthPolicy, *, is_draft_up: bool) -> str:
    """Why no running session drafts; empty while some do, or while none runs that a draft could serve.

    Where targets differ, the one with the most sessions counts.
    """
    if not is_draft_up:
        return "draft unavailable"
    if policy.is_off_by_load:
        return f"disabled by batch size: {policy.num_requests} requests run or wait"
    running = [controller for controller in policy.controllers if controller.num_sessions]
    asking = [controller for controller in running if controller.may_draft]
    if not asking:
        return "no request asks for drafts" if running else ""
    if any(controller.mode is Mode.SPECULATIVE for controller in asking):
        return ""
    return _why_plain(max(asking, key=lambda controller: controller.num_sessions))


def _why_plain(controller: DraftLengthController) -> str:
    sessions = f"{controller.num_sessions} session" + "s" * (controller.num_sessions > 1)
    if controller.is_comparing:
        return f"decoding with and without drafts is being compared with {sessions}"
    plain, speculative = controller.rates[Mode.PLAIN], controller.rates[Mode.SPECULATIVE]
    if not plain or not speculative:
        return f"drafting has not been tried yet with {sessions}"
    ratio = speculative / plain
    if controller.is_compared:
        return f"drafting does not pay: it gave {ratio:.2f} of plain with {sessions} when both were compared"
    verdict = "drafting does not pay" if ratio < 1.0 else "drafting does not pay for a switch yet"
    return f"{verdict}: expected {ratio:.2f} of plain at K={controller.expected_length} with {sessions}"
