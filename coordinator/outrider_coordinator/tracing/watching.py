"""What one event did to a session, as far as a trace shows it: read off its state machine before and after."""

from __future__ import annotations

from outrider_coordinator.session.loop import SessionLoop, Waiting
from outrider_coordinator.tracing.notes import Notes


class WatchedStep:
    """Made before an event is handed to a sampled session's loop; ``note`` after it."""

    __slots__ = ("_accepted", "_arrived_ns", "_base", "_drafted", "_loop", "_notes", "_steps", "_why_not")

    def __init__(self, loop: SessionLoop, notes: Notes) -> None:
        spec_stats = loop.spec_stats
        self._loop, self._notes = loop, notes
        self._arrived_ns = notes.clock()
        self._base, self._why_not = len(loop.tokens), loop.why_not
        self._steps, self._drafted, self._accepted = (
            spec_stats.num_steps,
            spec_stats.num_draft_tokens,
            spec_stats.num_accepted_tokens,
        )

    def note(self) -> None:
        """Note a verdict, if there was one, and whether the session waits for its draft now."""
        loop, spec_stats, notes = self._loop, self._loop.spec_stats, self._notes
        if spec_stats.num_steps > self._steps:
            num_drafted = spec_stats.num_draft_tokens - self._drafted
            notes.step_ended(
                self._arrived_ns,
                base_length=self._base,
                num_drafted=num_drafted,
                num_accepted=spec_stats.num_accepted_tokens - self._accepted,
                no_draft_reason="" if num_drafted else self._why_not.value,
            )
            if notes.is_full:
                loop.trace_items("")
        if loop.waiting is Waiting.DRAFT:
            notes.waits_for_draft()
