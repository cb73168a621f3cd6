"""Twins of a target whose sessions mostly ask for plain steps, and let some be computed ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.ports import Extend, Prepare, Score
from tests.serving.decode.twins import Known, Twins


class PlainTwins(Twins):
    """Items without drafts, each with credit for others; sessions end, leave and change their minds in between."""

    def _item(self, session: Known) -> Extend | Score:
        session.asked = self._new_generation()
        kept = min(session.held, len(session.tokens) - 1)
        if self._chance(self._oddity / 4) and kept > 3:  # a rollback
            kept = self._random.randint(1, kept)
        if session.is_new:
            kept = 0
        if not session.is_new and self._chance(self._oddity / 4):  # it changes its mind
            session.tokens[-1] = self._new_tokens(1)[0]
        session.drafts, session.held = (), kept
        digest, given = self._hash(session.tokens[:kept]), tuple(session.tokens[kept:])
        item = Score(session.number, session.asked, kept, digest, given)
        return self._broken(item) if self._chance(self._oddity / 8) else item

    def _send(self, commands: Sequence[Any]) -> None:
        super()._send(commands)
        items = [command for command in commands if isinstance(command, Score)]
        credit = [Prepare(item.session, item.generation, 0 if self._chance(self._oddity) else 30) for item in items]
        super()._send([each for each in credit if not self._chance(self._oddity)])
