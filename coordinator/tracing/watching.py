"""What one event did to a session, as far as a trace shows it: read off its state machine before and after."""

from __future__ import annotations

from coordinator.loop import SessionLoop, Waiting
from coordinator.tracing.notes import Notes


class WatchedStep:
    """Made before an event is handed to a sampled session's loop; ``note`` after it."""

    __slots__ = ("_accepted", "_arrived_ns", "_base", "_drafted", "_loop", "_notes", "_steps", "_why_not")

    def __init__(self, loop: SessionLoop, notes: Notes) -> None:
        tally = loop.tally
        self._loop, self._notes = loop, notes
        self._arrived_ns = notes.clock()
        self._base, self._why_not = len(loop.tokens), loop.why_not
        self._steps, self._drafted, self._accepted = (
            tally.num_steps,
            tally.num_draft_tokens,
            tally.num_accepted_tokens,
        )

    def note(self) -> None:
        """Note a verdict, if there was one, and whether the session waits for its draft now."""
        loop, tally, notes = self._loop, self._loop.tally, self._notes
        if tally.num_steps > self._steps:
            num_drafted = tally.num_draft_tokens - self._drafted
            notes.step_ended(
                self._arrived_ns,
                base_length=self._base,
                num_drafted=num_drafted,
                num_accepted=tally.num_accepted_tokens - self._accepted,
                no_draft_reason="" if num_drafted else self._why_not.value,
            )
            if notes.is_full:
                loop.trace_items("")
        if loop.waiting is Waiting.DRAFT:
            notes.waits_for_draft()
