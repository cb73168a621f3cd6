"""A target whose forwards are under way while commands come, on a CPU too."""

from __future__ import annotations

from typing import Any

from outrider.ports import Scores
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import InFlightForward, QueuedForward
from outrider.serving.session_table import Limits, SessionTable
from outrider_target.jobs import ScoreJob
from outrider_target.scorer import Scorer
from outrider_target.service import TargetCore


class Flying(Scorer):
    """Starts forwards before they are asked for; counts the items of those that followed another."""

    num_followed = 0

    @property
    def is_asynchronous(self) -> bool:
        return True

    def follow(self, flight: InFlightForward[Scores]) -> QueuedForward[ScoreJob, Scores] | None:
        following = super().follow(flight)
        self.num_followed += len(following.jobs) if following is not None else 0
        return following


def flying_core(scorer: Flying, **options: Any) -> TargetCore:
    """A core that computes ahead with it."""
    runner = scorer._runner
    limits = Limits(runner.config.vocab_size, runner.max_model_len, trims=False)
    return EngineCore(SessionTable(runner.sequences, limits), scorer, ahead=scorer, **options)
