"""Plain steps of one target's sessions, kept together.

A forward takes about as long for many sessions as for one. Sessions that decode without drafts, once they have fallen
into two groups, stay in them: each group is back while the other is computed, waits for that, and needs two forwards a
token. So a plain step is held while answers to other plain steps are due, and goes with the steps that follow from
these: one forward and one turn of the coordinator a token, however the requests came in. Drafting sessions are not
held: while one group is drafted for, the other is scored.

Owns which plain steps are due and which are held. Knows no text, no links and no time.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.ports import Score, TargetCommand


class Convoy:
    """The commands of one target on their way to it. All but plain steps pass at once."""

    def __init__(self, send: Callable[[TargetCommand], None]) -> None:
        self._send = send
        self._held: dict[int, Score] = {}  # by session
        self._due: set[int] = set()
        """Sessions whose plain step was sent and is not answered."""

    def send(self, command: TargetCommand) -> None:
        """Send a command, or hold it until ``depart``; a session's next command takes the place of one that is held."""
        session = command.session
        if isinstance(command, Score) and command.base_length and not command.draft_token_ids:
            self._held[session] = command
            return
        self._held.pop(session, None)
        self._send(command)
        if session in self._due:
            self._due.discard(session)  # nothing more is due to it
            self.depart()

    def answered(self, session: int) -> None:
        """Something has come of what was sent for this session."""
        self._due.discard(session)

    def depart(self) -> None:
        """Send what is held, unless answers are due: at the end of every turn in which commands or answers came."""
        if self._due or not self._held:
            return
        held, self._held = self._held, {}
        self._due.update(held)
        for command in held.values():
            self._send(command)
