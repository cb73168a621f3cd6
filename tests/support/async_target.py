"""A target whose forwards are in flight while commands come, on a CPU too."""

from __future__ import annotations

from typing import Any

from outrider.ports import Scores
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import InFlightForward, QueuedForward
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider_target.executor import TargetExecutor
from outrider_target.jobs import ScoreJob
from outrider_target.service import TargetCore


class AsyncTargetExecutor(TargetExecutor):
    """Queues forwards behind each other; counts the items of those that were queued."""

    num_queued = 0

    @property
    def is_asynchronous(self) -> bool:
        return True

    def queue(
        self, forward: InFlightForward[Scores], step: LookaheadStep | None = None
    ) -> QueuedForward[ScoreJob, Scores] | None:
        queued = super().queue(forward, step)
        if queued is not None:
            self.num_queued += len(queued.jobs if step is None else step)
        return queued


def lookahead_core(executor: AsyncTargetExecutor, **budget: Any) -> TargetCore:
    """A core that computes ahead with it."""
    runner = executor.runner
    limits = Limits(runner.config.vocab_size, runner.max_model_len, trims=False)
    return EngineCore(SessionRegistry(runner.sequences, limits), executor, TokenBudget(**budget), lookahead=True)
