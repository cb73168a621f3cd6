"""Real services and real session loops without threads and without an event loop, for very many short sessions.

The cores are those that the services' threads run, the plans are the coordinator's own; messages go in lock-step. What
``tests.support.stack`` has besides, threads, links and streams, is not here. The fixtures are both services': a tiny
model ``folder`` of the test package's own, its reference, and a runner of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.client.requests import build_request
from outrider.config import CoordinatorSettings
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Opened, Prepare
from outrider.sampling.support import DEFAULT_SUPPORT_LIMIT
from outrider.serving.engine_core import EngineCore
from outrider.tokenization import ModelText
from outrider_coordinator.session.actions import Fail, StepEnded, ToDraft, ToTarget
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.state import SessionStatus
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.proposers.registry import ServedProposer, without_kv
from outrider_draft.proposers.text.suffix import SuffixProposer
from outrider_draft.service import build_core as build_draft_core
from outrider_draft.service import build_model_core, build_ngram_core
from outrider_target.service import build_core
from tests.support.input_processing import SteppedProcessor
from tests.support.tiny_models import load_reference

AnyCore = EngineCore[Any, Any, Any, Any]

WIDTH = 256
"""Sessions that run beside each other."""
FORWARD = 4096
"""Most tokens in a forward."""
NUM_PAGES = 4 * WIDTH


@dataclass
class Run:
    """One session on the rig."""

    loop: SessionLoop
    token_ids: list[int] = field(default_factory=list)


class ServiceRig:
    """A target, a draft (a folder, "ngram" or None) and a coordinator's loop between them."""

    def __init__(
        self,
        target: Path,
        draft: Path | str | ServedProposer | None,
        *,
        support_limit: int = DEFAULT_SUPPORT_LIMIT,
        max_model_len: int = 64,
        takes_argmax: bool = False,
        target_forward: int = FORWARD,
        draft_forward: int = FORWARD,
        target_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = CoordinatorSettings(**settings)
        more = {"num_pages": NUM_PAGES, "max_model_len": max_model_len, **(target_options or {})}
        runner = ModelRunner.load(target, **more)
        if target_options is not None:
            runner.capture()
        self.target: AnyCore = build_core(runner, max_batched_tokens=target_forward)
        self.draft, self._facts = _build_draft(
            draft, DraftingRules(support_limit=support_limit, takes_argmax=takes_argmax), max_model_len, draft_forward
        )
        self._runner = runner
        self._input_processor = SteppedProcessor(self.settings, describe_model("target", target, runner), ModelText())
        self._policy = DraftLengthPolicy(self.settings.num_speculative_tokens)
        self.runs: dict[int, Run] = {}
        self._num_started = 0
        self._to_draft: list[Any] = []
        self._to_target: list[Any] = []
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.change_draft_event: Callable[[Any], Any] = lambda event: event
        """Change of a proposal on its way."""
        self.watch_target: Callable[[Run, Any, Any], None] | None = None
        """Sees each session, what its target was asked and what it answered, before the loop does."""

    def generate(self, requests: Iterable[dict[str, Any]], *, enough: int | None = None) -> list[list[int]]:
        """The output of every request; a session is cancelled when it has ``enough`` tokens."""
        todo = iter(requests)
        runs: list[Run] = []
        while True:
            while len(self.runs) < WIDTH and (options := next(todo, None)) is not None:
                runs.append(self._start(options))
            if not self.runs:
                return [run.token_ids for run in runs]
            self._turn(self.draft, self._to_draft, SessionLoop.on_draft_event, enough)
            self._turn(self.target, self._to_target, SessionLoop.on_target_event, enough)

    def num_pages_used(self) -> int:
        """Used pages of the target, its books checked; what was released takes a turn to arrive."""
        self._turn(self.target, self._to_target, SessionLoop.on_target_event, None)
        self._runner.sequences.check_integrity()
        return self._runner.sequences.pool.num_used

    def _start(self, options: dict[str, Any]) -> Run:
        request, _ = build_request(options)  # type: ignore[arg-type]
        run = Run(SessionLoop(self._input_processor.process(request), self._policy, draft=self._facts))
        self._num_started += 1
        self.runs[self._num_started] = run
        run.loop.start(self._num_started)
        self._collect(self._num_started, run)
        return run

    def _turn(
        self, core: AnyCore | None, commands: list[Any], deliver: Callable[[SessionLoop, Any], None], enough: int | None
    ) -> None:
        if core is None or not commands:
            return
        sent = {command.session: command for command in commands if not isinstance(command, Prepare)}
        core.handle(0, commands)
        commands.clear()
        while core.has_work:
            for _, batch in core.step():
                for event in batch.events:
                    self._deliver(core, sent, event, deliver, enough)

    def _deliver(
        self,
        core: AnyCore,
        sent: dict[int, Any],
        event: Any,
        deliver: Callable[[SessionLoop, Any], None],
        enough: int | None,
    ) -> None:
        run = self.runs.get(event.session)
        if run is None:
            return
        if isinstance(event, Opened):
            pass  # said beside the answers that are changed and watched
        elif core is self.draft:
            event = self.change_draft_event(event)
        elif self.watch_target is not None:
            self.watch_target(run, sent[event.session], event)
        deliver(run.loop, event)
        self._collect(event.session, run)
        if enough is not None and len(run.token_ids) >= enough and run.loop.status is not SessionStatus.FINISHED:
            run.loop.cancel()
            self._collect(event.session, run)

    def _collect(self, session: int, run: Run) -> None:
        for action in run.loop.take_actions():
            if isinstance(action, ToDraft):
                self._to_draft.append(action.command)
            elif isinstance(action, ToTarget):
                self._to_target.append(action.command)
            elif isinstance(action, StepEnded):
                run.token_ids.extend(action.token_ids)
                self.num_draft_tokens += action.num_draft_tokens
                self.num_accepted_tokens += action.num_accepted
            elif isinstance(action, Fail):
                raise action.error
        if run.loop.is_over:
            self.runs.pop(session, None)


def _build_draft(
    draft: Path | str | ServedProposer | None, rules: DraftingRules, max_model_len: int, forward: int
) -> tuple[AnyCore | None, DraftFacts | None]:
    if draft is None:
        return None, None
    if isinstance(draft, ServedProposer):
        found = draft.description
        facts = DraftFacts(found.max_model_len, found.num_token_ids, found.hidden_state_layers)
        return build_draft_core(draft, max_batched_tokens=forward), facts
    if draft == "suffix":
        return build_draft_core(without_kv(SuffixProposer(), name="suffix"), max_batched_tokens=FORWARD), DraftFacts()
    if isinstance(draft, str):
        return build_ngram_core(min_n=1, max_n=3, max_batched_tokens=FORWARD), DraftFacts()
    runner = ModelRunner.load(draft, num_pages=NUM_PAGES, max_model_len=max_model_len, drafting=rules)
    proposer = ModelProposer(runner)
    known = describe_model("draft", draft, runner).num_token_ids
    return build_model_core(proposer, max_batched_tokens=FORWARD), DraftFacts(runner.max_model_len, known)


@pytest.fixture(scope="session", name="reference")
def tiny_reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(name="runner")
def tiny_runner(folder: Path) -> Iterator[ModelRunner]:
    loaded = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=256)
    with torch.inference_mode():
        loaded.kv_cache.fill_(float("nan"))  # a stale read would show
    yield loaded
    loaded.sequences.check_integrity()
