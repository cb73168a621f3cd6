"""Figures of a coordinator at one moment, for tests: requests since its start, speculation, and its services."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.types import FinishReason
from outrider_coordinator.service import Coordinator
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats


@dataclass(frozen=True, slots=True)
class CoordinatorStats:
    """Requests that have ended count in one of the fields after ``num_waiting``."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_cancelled: int
    num_expired: int
    num_failed: int
    num_refused: int
    """Refused because the queue was full."""
    spec_stats: SpecDecodeStats
    """Speculation of requests that have ended."""
    target_pages_free: int
    draft_pages_free: int
    num_targets: int
    num_drafts: int


def stats_of(coordinator: Coordinator) -> CoordinatorStats:
    """The figures of this moment."""
    manager, target, draft = coordinator.request_manager, coordinator.services.target, coordinator.services.draft
    endings, values = manager.endings, {(each.name, each.labels): each.value for each in coordinator.readings()}
    refused = values["outrider_requests_refused_total", (("reason", "queue_full"),)]
    assert isinstance(refused, int)
    num_cancelled = endings.by_reason[FinishReason.CANCELLED]
    return CoordinatorStats(
        num_running=len(manager.admission.running),
        num_waiting=len(manager.admission.waiting),
        num_finished=endings.by_reason.total() - num_cancelled,
        num_cancelled=num_cancelled,
        num_expired=endings.num_expired,
        num_failed=endings.num_failed,
        num_refused=refused,
        spec_stats=endings.spec_stats,
        target_pages_free=target.num_pages_free,
        draft_pages_free=draft.num_pages_free if draft else 0,
        num_targets=len(target.attached),
        num_drafts=len(draft.attached) if draft else 0,
    )
