"""The coordinator in process: takes requests in, drives their sessions over two links, gives out what they emit.

Owns the event loop's side of things: streams, timers, links, the routing of events to sessions. Decides nothing about
tokens (``loop``), who runs (``admission``) or how a link is kept (``attachment``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial

from coordinator import actions
from coordinator.attachment import Attachment
from coordinator.loop import SessionLoop
from coordinator.pair import check_pair
from coordinator.planning import Planner
from coordinator.roster import Roster
from coordinator.sides import DraftFacts
from coordinator.speculation import DraftLengthPolicy
from coordinator.stats import CoordinatorStats
from coordinator.text import TextTokenizer
from coordinator.ticket import Ticket
from outrider import __version__
from outrider.config import CoordinatorSettings
from outrider.errors import OutriderError, PairMismatchError, UnavailableError
from outrider.generation import Delta, GenerationRequest, ModelInfo
from outrider.ports import (
    Draft,
    DraftCommand,
    DraftEvent,
    EventBatch,
    ForwardReport,
    Scores,
    Target,
    TargetCommand,
    TargetEvent,
)
from outrider.types import ModelDescription

_log = logging.getLogger(__name__)

LONG_PROMPT_CHARACTERS = 50_000
"""Longer prompts are tokenized in a thread, so that the streams of others go on."""


class Coordinator:
    """Serves generations from a target and, where there is one, a draft. Made and used on one event loop."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        settings: CoordinatorSettings,
        *,
        on_target: Callable[[bool], None] = lambda is_up: None,
    ) -> None:
        """``on_target`` is told whenever the target is attached or lost."""
        self._settings = settings
        self._on_target = on_target
        self._tokenizer = None if settings.tokenizer is None else TextTokenizer.from_folder(settings.tokenizer)
        self._planner: Planner | None = None
        self._policy = DraftLengthPolicy(
            settings.num_speculative_tokens, disable_by_batch_size=settings.disable_by_batch_size
        )
        self._roster = Roster(self._policy, max_running=settings.max_running_requests, max_queue=settings.max_queue)
        self._target_known = asyncio.Event()
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._has_given_up = False
        self._target: Attachment[TargetCommand, TargetEvent] = Attachment(
            target,
            "target",
            accept=self._accept_target,
            on_attached=self._target_attached,
            on_batch=self._on_target_batch,
            on_lost=self._target_lost,
        )
        self._draft: Attachment[DraftCommand, DraftEvent] | None = None
        if draft is not None:
            self._draft = Attachment(
                draft,
                "draft",
                accept=self._accept_draft,
                on_attached=self._draft_attached,
                on_batch=self._on_draft_batch,
                on_lost=self._draft_lost,
            )

    # Life.

    async def start(self) -> None:
        """Attach to the target, however long that takes, and try the draft once.

        A draft that cannot be reached is tried again and again in the background. Raises ``PairMismatchError`` for a
        draft that does not fit, ``ConfigError`` for a tokenizer that cannot be used.
        """
        self._target.start()
        if self._draft is not None:
            self._draft.start()
        await self._target.first_try()
        await self._target_known.wait()
        if self._draft is not None:
            await self._draft.first_try()

    async def close(self) -> None:
        """End what still runs, with ``UnavailableError``, and give back what both services hold."""
        self._stop_give_up_timer()
        self._fail_all(UnavailableError("the coordinator is shutting down"))
        if self._draft is not None:
            await self._draft.close()
        await self._target.close()

    # What users ask.

    async def generate_stream(
        self, request: GenerationRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Delta, None]:
        """New output as it comes; the last delta carries the result. Closing the iterator cancels the request."""
        ticket = await self._take_in(request)
        if deadline_s is not None:
            ticket.call_later(deadline_s, partial(self._deliver, ticket, ticket.loop.expire))
        try:
            async for delta in ticket.deltas():
                yield delta
        finally:
            self._deliver(ticket, ticket.loop.cancel)

    async def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        target, draft = self._require_target(), self._draft and self._draft.description
        return ModelInfo(
            target_model=target.model_name,
            draft_model=draft.model_name if draft else "",
            max_model_len=target.max_model_len,
            num_token_ids=target.num_token_ids,
            eos_token_ids=target.eos_token_ids,
            num_speculative_tokens=self._settings.num_speculative_tokens,
            acceptance_method=self._settings.acceptance_method,
            draft_attached=self._draft is not None and self._draft.is_up,
            version=__version__,
            num_running=self._roster.num_running,
            num_waiting=self._roster.num_waiting,
            target_pages_free=self._target.num_pages_free,
            draft_pages_free=self._draft.num_pages_free if self._draft else 0,
        )

    def stats(self) -> CoordinatorStats:
        """Figures of this moment."""
        endings = self._roster.endings
        return CoordinatorStats(
            num_running=self._roster.num_running,
            num_waiting=self._roster.num_waiting,
            num_finished=endings.num_finished,
            num_cancelled=endings.num_cancelled,
            num_failed=endings.num_failed,
            num_refused=endings.num_refused,
            tally=endings.tally,
            target_pages_free=self._target.num_pages_free,
            draft_pages_free=self._draft.num_pages_free if self._draft else 0,
            num_target_messages=self._target.num_messages_sent,
            num_draft_messages=self._draft.num_messages_sent if self._draft else 0,
        )

    # Taking in.

    async def _take_in(self, request: GenerationRequest) -> Ticket:
        planner = self._require_planner()
        if len(request.prompt or "") > LONG_PROMPT_CHARACTERS:
            plan = await asyncio.to_thread(planner.plan, request)
            self._require_planner()  # time has passed
        else:
            plan = planner.plan(request)
        facts = self._draft_facts()
        ticket = Ticket(SessionLoop(plan, self._policy, draft=facts, tokenizer=planner.tokenizer))
        self._roster.submit(ticket)
        self._admit()
        return ticket

    def _require_planner(self) -> Planner:
        if self._planner is None or self._has_given_up:
            raise UnavailableError("the target cannot be reached")
        return self._planner

    def _require_target(self) -> ModelDescription:
        if self._target.description is None:
            raise UnavailableError("no target has been attached yet")
        return self._target.description

    def _draft_facts(self) -> DraftFacts | None:
        if self._draft is None or not self._draft.is_up or self._draft.description is None:
            return None
        return DraftFacts(self._draft.description.max_model_len, self._draft.description.num_token_ids)

    def _admit(self) -> None:
        """Start whoever may run now."""
        if self._target.is_up:
            for ticket in self._roster.to_start():
                ticket.stopwatch.note_admitted()
                self._deliver(ticket, partial(ticket.loop.start, ticket.session))

    # Events to sessions, and what they ask for.

    def _on_target_batch(self, batch: EventBatch[TargetEvent]) -> None:
        for event in batch.events:
            ticket = self._roster.find(event.session)
            if ticket is not None:
                self._deliver(ticket, partial(ticket.loop.on_target_event, event), batch.report)
                if isinstance(event, Scores) and self._roster.found_room(ticket):
                    self._admit()

    def _on_draft_batch(self, batch: EventBatch[DraftEvent]) -> None:
        for event in batch.events:
            ticket = self._roster.find(event.session)
            if ticket is not None:
                self._deliver(ticket, partial(ticket.loop.on_draft_event, event), batch.report)

    def _deliver(self, ticket: Ticket, event: Callable[[], None], report: ForwardReport | None = None) -> None:
        ticket.deliver(event, report)
        for action in ticket.loop.take_actions():
            self._act(ticket, action)
        ticket.flush()

    def _act(self, ticket: Ticket, action: actions.Action) -> None:
        match action:
            case actions.ToDraft(command):
                if self._draft is not None:
                    self._draft.send(command)
            case actions.ToTarget(command):
                self._target.send(command)
            case actions.Emit():
                ticket.emit(action)
            case actions.SetDraftTimer(timer):
                ring = partial(self._deliver, ticket, partial(ticket.loop.draft_timed_out, timer))
                ticket.set_draft_timer(self._settings.draft_timeout_ms / 1000, ring)
            case actions.ClearDraftTimer():
                ticket.clear_draft_timer()
            case actions.RetryDraftAfter(retry_after_ms):
                ticket.call_later(retry_after_ms / 1000, partial(self._retry_draft, ticket))
            case actions.Park(retry_after_ms):
                self._park(ticket, retry_after_ms)
            case actions.Finish() | actions.Fail():
                self._end(ticket, action)

    def _retry_draft(self, ticket: Ticket) -> None:
        facts = self._draft_facts()
        if facts is not None:  # otherwise every session is told when the draft is back
            self._deliver(ticket, partial(ticket.loop.draft_back, facts))

    def _park(self, ticket: Ticket, retry_after_ms: int) -> None:
        """The target has no room: wait at the head of the queue until pages come free, or for a while."""
        self._roster.park(ticket)
        ticket.call_later(retry_after_ms / 1000, self._unblock)

    def _unblock(self) -> None:
        self._roster.unblock()
        self._admit()

    def _end(self, ticket: Ticket, ending: actions.Finish | actions.Fail) -> None:
        ticket.end(ending)
        self._roster.end(ticket, ending)
        # In a later turn: this may be in the middle of telling every session something.
        asyncio.get_running_loop().call_soon(self._admit)

    def _fail_all(self, error: OutriderError) -> None:
        for ticket in self._roster.all():
            self._deliver(ticket, partial(ticket.loop.fail, error))

    def _tell_all(self, event: Callable[[SessionLoop], None]) -> None:
        for ticket in self._roster.all():
            self._deliver(ticket, partial(event, ticket.loop))

    # The target comes and goes.

    async def _accept_target(self, description: ModelDescription) -> None:
        known = self._target.description
        if known is None:
            tokenizer = self._tokenizer or TextTokenizer.from_files(
                description.tokenizer_files, bos_token_id=description.bos_token_id
            )
            self._planner = Planner(self._settings, description, tokenizer)
        elif (known.tokenizer_hash, known.num_token_ids) != (description.tokenizer_hash, description.num_token_ids):
            raise PairMismatchError(
                f"the target came back as another model, {description.model_name}: sessions of {known.model_name}"
                " cannot go on there"
            )

    def _target_attached(self) -> None:
        self._target_known.set()
        self._stop_give_up_timer()
        self._has_given_up = False
        self._on_target(True)
        self._tell_all(SessionLoop.target_back)
        self._unblock()

    def _target_lost(self) -> None:
        self._on_target(False)
        self._tell_all(SessionLoop.target_lost)
        self._stop_give_up_timer()
        self._give_up_timer = asyncio.get_running_loop().call_later(self._settings.target_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._has_given_up = True
        self._fail_all(UnavailableError(f"the target was not back after {self._settings.target_timeout_s:g} s"))

    def _stop_give_up_timer(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    # The draft comes and goes.

    async def _accept_draft(self, description: ModelDescription) -> None:
        await self._target_known.wait()
        check_pair(self._require_target(), description)

    def _draft_attached(self) -> None:
        facts = self._draft_facts()
        if facts is not None:
            self._tell_all(partial(_tell_draft_back, facts))

    def _draft_lost(self) -> None:
        self._tell_all(SessionLoop.draft_lost)


def _tell_draft_back(facts: DraftFacts, loop: SessionLoop) -> None:
    loop.draft_back(facts)
