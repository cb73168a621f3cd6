"""A bench over toy services, and the plans and languages that tests of the loop share."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.ports import (
    Extend,
    Score,
)
from outrider.types import (
    AcceptanceMethod,
)
from outrider_coordinator.session.engine_request import EngineRequest
from tests.coordinator.driving import Bench, Driven, make_plan
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows

VOCAB_SIZE = 8
ROWS = random_rows(VOCAB_SIZE, seed=1)
OTHER_ROWS = random_rows(VOCAB_SIZE, seed=2)
METHODS = tuple(AcceptanceMethod)


def mixed_rows(tokens: tuple[int, ...]) -> np.ndarray:
    """A middling draft."""
    return np.asarray(0.7 * ROWS(tokens) + 0.3 * OTHER_ROWS(tokens))


class Setting:
    """A bench over toys, and the toys."""

    def __init__(self, *, draft_rows: Any = ROWS, has_draft: bool = True, draft_length: int = 4, **policy: Any) -> None:
        self.target, self.draft = ToyTarget(ROWS, VOCAB_SIZE), ToyDraft(draft_rows, VOCAB_SIZE)
        self.target_core, self.draft_core = self.target.core(), self.draft.core()
        draft = self.draft_core if has_draft else None
        self.bench = Bench(self.target_core, draft, draft_length=draft_length, **policy)

    def run(self, plan: EngineRequest) -> Driven:
        driven = self.bench.add(plan)
        self.bench.run()
        return driven

    @property
    def extends(self) -> list[Extend]:
        return [command for command in self.bench.sent_to_draft if isinstance(command, Extend)]

    @property
    def scores(self) -> list[Score]:
        return [command for command in self.bench.sent_to_target if isinstance(command, Score)]

    def all_is_free(self) -> bool:
        return not (
            self.target_core.sessions
            or self.draft_core.sessions
            or self.bench.to_draft
            or self.bench.to_target
        )  # fmt: skip


def plan_of(**fields: Any) -> EngineRequest:
    return make_plan(vocab_size=VOCAB_SIZE, **{"prompt": (1, 2, 3), "max_tokens": 24, **fields})


def own_tokens(plan: EngineRequest) -> list[int]:
    """Token ids of the target alone."""
    setting = Setting(has_draft=False)
    return setting.run(plan).token_ids
