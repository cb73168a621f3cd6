"""The reason of a target's mode, in words for logs and ``outrider info``."""

from __future__ import annotations

import math

from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.mode_selector import Mode


def mode_reason(controller: DraftLengthController) -> str:
    """Why the sessions of a target draft, or decode plainly."""
    sessions = f"{controller.num_sessions} session" + "s" * (controller.num_sessions > 1)
    if controller.is_comparing:
        return f"decoding with and without drafts is being compared with {sessions}"
    if controller.mode is Mode.SPECULATIVE:
        return "drafting pays"
    plain, speculative = controller.rates[Mode.PLAIN], controller.rates[Mode.SPECULATIVE]
    if not plain or not speculative:
        return f"drafting has not been tried yet with {sessions}"
    ratio = speculative / plain
    if controller.is_compared:
        return f"drafting does not pay: it gave {ratio:.2f} of plain with {sessions} when both were compared"
    expected = f"expected {ratio:.2f} of plain at K={controller.expected_length} with {sessions}"
    if ratio < 1.0:
        return f"drafting does not pay: {expected}"
    if math.isinf(controller.doubt):
        return f"drafting has not been tried yet: {expected}"
    known = ", and timed with fewer only" if controller.doubt > 1.0 else ""
    return f"drafting may not pay for a switch: {expected}{known}"
