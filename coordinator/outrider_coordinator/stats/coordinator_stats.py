"""A coordinator's figures at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats


@dataclass(frozen=True, slots=True)
class CoordinatorStats:
    """Counts since the start, over requests that have ended, and what is going on now."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_cancelled: int
    num_expired: int
    """Ended by their callers' deadlines."""
    num_failed: int
    num_refused: int
    """Refused because the queue was full."""
    spec_stats: SpecDecodeStats
    """Counts of speculation."""
    target_pages_free: int
    draft_pages_free: int
    num_target_messages: int
    """Messages sent to the target; commands that arise together share one."""
    num_draft_messages: int
    num_targets: int
    """Replicas that are attached."""
    num_drafts: int
