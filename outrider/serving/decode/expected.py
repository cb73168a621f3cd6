"""Expected step: one whose draft tokens are still to come, planned while the draft computes them.

A ``ScoreAhead`` says all of a step but its draft tokens. If the step could be begun at once, it is checked, its KV
pages are taken and its forward is laid out, so that little is left to do between the arrival of the proposals and the
launch. If anything else comes first, the pages are given back; nothing else was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.batched import ScoreBatch
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.decode.waiting import WaitingSessions
from outrider.serving.executor import Executor


class ExpectedStep:
    """The expected step of one core, if there is one."""

    def __init__(self, executor: Executor[Any, Any, Any, Any]) -> None:
        self._executor = executor
        self._found: tuple[DecodeBatch, WaitingSessions] | None = None

    def plan(self, step: DecodeBatch, waiting: WaitingSessions) -> None:
        """Expect a step, whose sessions wait, in place of the one before. Not planned, it is not expected."""
        self.drop()
        step.plan = self._executor.plan_draft_batch(step)
        if step.plan is not None:
            self._found = step, waiting

    def take(self, commands: Sequence[Any], arrived_ns: int) -> DecodeBatch | None:
        """The step, if a message brings its draft tokens and nothing else; its sessions wait no more. None: no step is
        expected from now on.
        """
        if self._found is None:
            return None
        step, waiting = self._found
        batched = commands[0] if len(commands) == 1 else None
        # Draft tokens are put into the very arrays of the ``ScoreAhead``: what shares an array with it is it.
        if isinstance(batched, ScoreBatch) and batched.generations is step.batched.generations:
            step.batched, step.arrived_ns = batched, arrived_ns
            if self._executor.takes_drafts(step):
                self._found = None
                waiting.take(step)
                return step
        self.drop()
        return None

    def drop(self) -> None:
        """Expect nothing, and give back what the plan has taken."""
        found, self._found = self._found, None
        if found is not None:
            self._executor.drop_plan(found[0].plan)
