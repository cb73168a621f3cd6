"""Decode batches of a core: from arrays that arrive to arrays that leave; single items take the scheduler's queue.

A step is taken whole if its sessions all wait, nothing else is due, and the executor takes it; otherwise its items go
one by one. While it is under way it has no requests: should anything else come for one of its sessions, it is turned
into the batch of requests that single items would have made. What can wait until the device computes, or until the
answers have left, does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outrider.batched import CommandBatch, ExtendBatch, ScoreBatch, is_batch, one_by_one
from outrider.errors import OutriderError
from outrider.ports import Extend
from outrider.proposal_channel.pushes import ChainStart
from outrider.proposal_channel.verdicts import Verdicts
from outrider.recording import ForwardRecord
from outrider.serving.decode.begun import (
    BegunSteps,
    ShortenedForward,
    continue_same,
    extends_after,
)
from outrider.serving.decode.drafts_ahead import DraftsAhead
from outrider.serving.decode.expected import ExpectedStep
from outrider.serving.decode.guesses import Guesses
from outrider.serving.decode.sessions import Bools, RunningSessions
from outrider.serving.decode.step import DecodeBatch, joined
from outrider.serving.decode.steps_ahead import StepsAhead
from outrider.serving.decode.waiting import WaitingSessions
from outrider.serving.executor import CommonEvent, Executor, ExecutorOutput, References
from outrider.serving.output_processor import Messages, OutputProcessor
from outrider.serving.request import (
    AnyRequest,
    Batch,
    Request,
    RequestStatus,
    RunningJob,
    ScheduledTokens,
    num_drafts,
)
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats
from outrider.values import step_value


@step_value(frozen=True, slots=True)
class _Answered:
    """A step whose answers leave."""

    step: DecodeBatch
    batch: Batch
    forward: ForwardRecord
    bases: Sequence[int]
    postprocess: Callable[[], None] | None
    """The executor's (``ExecutorOutput``)."""
    is_pushed: bool = False
    """Nothing of its sessions is committed by it, and none waits for an item."""


_Parts = tuple[Sequence[Any], CommandBatch | None, Sequence[Any]]


class DecodeBatches:
    """Decode batches of one core."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        scheduler: Scheduler,
        outputs: OutputProcessor,
        *,
        stats: ServiceStats,
        is_enabled: bool,
        take_item: Callable[[int, Any, int], None],
        references: References | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``take_item`` takes a single item: link, item, time of arrival."""
        self._references = references
        self._sessions, self._executor, self._scheduler, self._outputs = sessions, executor, scheduler, outputs
        self._is_enabled, self._take_item = is_enabled, take_item
        self.pending: DecodeBatch | None = None
        """Arrived, and not begun."""
        self._expected = ExpectedStep(executor)
        self._begun, self._stats = BegunSteps(stats), stats
        self.ahead = StepsAhead(sessions, executor, scheduler, outputs, stats=stats, clock=clock)
        self.drafts = DraftsAhead(sessions, executor, scheduler, outputs, stats)
        self._guesses = Guesses(sessions, executor, self._begun)
        self._wanted: dict[SessionKey, int] = {}
        """Draft tokens that a session was asked for and did not get, since fewer had been begun."""
        self._running: Batch | None = None
        self._answered: _Answered | None = None
        self._waiting: dict[SessionKey, tuple[WaitingSessions, int]] = {}
        """Waiting place of each session, now or last."""
        self._links = scheduler.plain.links
        """Links that send arrays."""

    # Commands.

    def split(self, link_id: int, commands: Sequence[Any]) -> _Parts:
        """The commands of a message that go one by one, what may be one step after them, and commands after that."""
        if not any(isinstance(command, CommandBatch) for command in commands):
            return commands, None, ()
        if not self._is_enabled:
            return one_by_one(commands), None, ()
        self._links.add(link_id)
        if len(commands) == 1 and self._may_be_taken(link_id, commands[0]):
            return (), commands[0], ()
        parts = one_by_one(commands, stays=partial(self._may_be_taken, link_id))
        batched = [command for command in parts if isinstance(command, CommandBatch)]
        if not batched:
            return parts, None, ()
        first = parts.index(batched[0])
        end = first + len(batched)
        before, after = parts[:first], parts[end:]
        if any(type(each) is not type(batched[0]) for each in parts[first:end]):
            return one_by_one(commands), None, ()
        step = joined(batched)
        return (one_by_one(commands), None, ()) if step is None else (before, step, after)

    def _may_be_taken(self, link_id: int, batched: CommandBatch) -> bool:
        """True if arrays may be a step, or ask for what was computed before; cheap to tell of a decode step."""
        is_known = (link_id, batched.sessions.item(0)) in self._waiting or self._scheduler.plain.has_members
        return is_batch(batched) and (is_known or any(batched.draft_lengths.tolist()))

    def take(self, link_id: int, batched: CommandBatch, arrived_ns: int, *, is_free: bool) -> None:
        """Take arrays as a step to be begun next, or item by item. ``is_free``: no forward is in flight."""
        is_taken = self._claim(link_id, batched, arrived_ns)
        if is_taken is not None and is_taken.all():
            return
        items: Iterable[Any] | None = None
        if is_taken is not None and is_taken.any():
            items = [item for item, is_done in zip(batched.items(), is_taken.tolist(), strict=True) if not is_done]
        found = self._waiting.get((link_id, batched.sessions.item(0))) if items is None else None
        # Steps that go on by themselves are made one as soon as both have ended.
        may_wait = isinstance(batched, ScoreBatch) and batched.begins_next and self._running is not None
        if found is not None and (is_free or may_wait) and self.pending is None and self._scheduler.is_free:
            waiting, _ = found
            step = waiting.find(link_id, batched, arrived_ns)
            if step is not None and self._is_taken(step):
                waiting.take(step)
                self.pending = step
                return
        for item in batched.items() if items is None else items:
            self._take_item(link_id, item, arrived_ns)

    def _claim(self, link_id: int, batched: CommandBatch, arrived_ns: int) -> Bools | None:
        """Answer what was computed before it was asked for; which commands that were, None where none can be."""
        if isinstance(batched, ExtendBatch):
            self._drop_begun_pending()
            return self._claim_begun(link_id, batched, arrived_ns)
        if not self._scheduler.plain.has_members:
            return None
        answers, is_taken = self._scheduler.take_plain(link_id, batched, arrived_ns)
        self._outputs.put_plain(answers)
        return is_taken

    def _claim_begun(self, link_id: int, batched: ExtendBatch, arrived_ns: int) -> Bools | None:
        claims = self._begun.claim(link_id, batched)
        if not claims:
            return None
        is_taken: Bools = np.zeros(len(batched), dtype=np.bool_)
        for begun, rows, indices in claims:
            is_taken[rows] = True
            own, generations = begun.step.own.selected(np.array(indices)), batched.generations[rows].tolist()
            bases, counts = begun.step.bases[indices].tolist(), begun.answers.counts[indices].tolist()
            lengths = batched.draft_lengths[rows].tolist(), begun.step.draft_lengths[indices].tolist()
            heads = zip(own.sessions, generations, bases, counts, *lengths, strict=True)
            for session, generation, base, count, asked, length in heads:
                session.generation, session.used_ns = generation, arrived_ns
                if asked < count:
                    self._truncate_held([session], [base + asked - 1])
                elif asked > length:
                    self._wanted[session.key] = asked
                self._sessions.commit(session, base)
                if (found := self._waiting.get(session.key)) is not None:  # none after single items
                    found[0].claim(found[1], generation, base)
            self._scheduler.note_claimed(own.keys, arrived_ns)
            self._outputs.put_claimed(begun, batched, rows, indices, arrived_ns)
        return is_taken

    def start_chains(self, link_id: int, start: ChainStart) -> None:
        """Go on from proposals that were sent directly."""
        for key in self.drafts.start(link_id, start):
            self._unregister(key)
        self._guesses.start(link_id, start.verdicts, start.channel, self._wanted)

    def _unregister(self, key: SessionKey) -> None:
        """A session waits here no more: its next item is compared with what it holds by then."""
        self._begun.drop(key)
        if (found := self._waiting.pop(key, None)) is not None:
            waiting, row = found
            waiting.drop(row)

    def begin(self, link_id: int, verdicts: Verdicts, arrived_ns: int) -> None:
        """Begin the proposals that follow from verdicts, unless something that was asked for is to be begun."""
        if self.pending is not None or self._executor.is_asynchronous:
            return
        batched = extends_after(self._sessions, self._executor, link_id, verdicts, self._wanted)
        if batched is None:
            return
        self.pending = self._begun_step(link_id, batched, arrived_ns)
        if self.pending is not None or self._executor.reads_states:
            return
        for item in batched.items():
            session = self._sessions.get(link_id, item.session)
            if session is not None and self._may_begin(session, item):
                self.invalidate(session.key)
                if self._sessions.rewind(session, item.num_kept_tokens, item.prefix_hash) is None:
                    self._scheduler.lookahead.begin(session, item)

    @property
    def runs_begun(self) -> bool:
        """True if a begun step is under way, and nothing has asked for it."""
        step = None if self._running is None else self._running.decode
        return step is not None and not step.is_asked

    def adopt(self, link_id: int, commands: Sequence[Any], arrived_ns: int) -> bool:
        """Have the begun step that is under way answer a message that continues the same texts. Where it asks for fewer
        draft tokens it gets their first ones, and where it asks for more those that were begun.
        """
        batch = self._running
        step = None if batch is None else batch.decode
        if batch is None or step is None or step.is_asked or step.link_id != link_id or len(commands) != 1:
            return False
        if step is self.drafts.running or step is self._guesses.running:
            return False
        batched = commands[0]
        begun = step.batched
        if not isinstance(batched, ExtendBatch) or not isinstance(begun, ExtendBatch):
            return False
        if not continue_same(batched, begun):
            return False
        if self._references is not None:
            self._references.fetch_batch(batched)  # so that the target has the places back
        step.batched, step.arrived_ns, step.is_asked = batched, arrived_ns, True
        self._waiting[next(iter(step.keys))][0].take(step)
        self._note_asked(step)
        self._stats.num_lookahead_used += len(step)
        lengths = zip(step.keys, batched.draft_lengths.tolist(), step.draft_lengths.tolist(), strict=True)
        self._wanted.update({key: asked for key, asked, begun in lengths if asked > begun})
        if (batched.draft_lengths < step.draft_lengths).any():
            truncate = partial(self._truncate_held, step.sessions)
            batch.forward = ShortenedForward(batch.forward, batched.draft_lengths, truncate)
        return True

    def _truncate_held(self, sessions: Sequence[Session[Any]], lengths: Sequence[int]) -> None:
        """Truncate the sessions that have not ended meanwhile."""
        for session, length in zip(sessions, lengths, strict=True):
            if self._sessions.holds(session):
                self._sessions.truncate([session], [length])

    def _may_begin(self, session: Session[Any], item: Extend) -> bool:
        """True if nothing of a session is due or held, and the item is valid and needs a forward."""
        try:
            is_served_at_once = self._executor.check(session, item) is not None
        except OutriderError:
            return False
        return not is_served_at_once and self._scheduler.queue.first(session.key) is None

    def _begun_step(self, link_id: int, batched: ExtendBatch, arrived_ns: int) -> DecodeBatch | None:
        """Step of these commands, which changes nothing before it starts; None: they go one by one."""
        waiting, _ = self._waiting.get((link_id, batched.sessions.item(0)), (None, 0))
        if waiting is None or not self._scheduler.is_free:
            return None
        step = waiting.find(link_id, batched, arrived_ns, is_asked=False)
        return step if step is not None and self._is_taken(step) else None

    def _is_taken(self, step: DecodeBatch) -> bool:
        return self._scheduler.takes_decode_batch(step) and self._executor.takes_batch(step)

    def expect(self, link_id: int, batched: ScoreBatch) -> None:
        """Plan the step of arrays whose draft tokens are still to come, if it could be begun now."""
        found = self._waiting.get((link_id, batched.sessions.item(0)))
        if (
            found is None
            or self.pending is not None
            or not self._scheduler.is_free
            or self._scheduler.plain.has_members
        ):
            return
        waiting, _ = found
        step = waiting.find(link_id, batched, 0)
        if step is not None and self._scheduler.takes_decode_batch(step):
            self._expected.plan(step, waiting)

    def take_expected(self, commands: Sequence[Any], arrived_ns: int) -> bool:
        """Take a message that brings just the draft tokens of the step that is expected. After any other message no
        step is.
        """
        step = self._expected.take(commands, arrived_ns)
        if step is None:
            return False
        self.pending = step
        return True

    def invalidate(self, key: SessionKey) -> None:
        """Invalidate a session's step: something else than arrays comes for it, or it ends."""
        self._begun.drop(key)
        self.ahead.drop(key)
        self.drafts.drop(key)
        self._guesses.drop(key)
        self._wanted.pop(key, None)
        if (found := self._waiting.pop(key, None)) is not None:
            waiting, row = found
            waiting.drop(row)
        if self.pending is not None:
            self._split_pending()
        running = self._running
        if running is not None and running.decode is not None and key in running.decode.keys:
            self.split_running()

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        self._expected.drop()
        if self.pending is not None:
            self._split_pending()
        if self._running is not None and self._running.decode is not None and self._running.decode.link_id == link_id:
            self.split_running()
        self._begun.drop_link(link_id)
        self.ahead.drop_link(link_id)
        self.drafts.drop_link(link_id)
        self._guesses.drop_link(link_id)
        self._wanted = {key: length for key, length in self._wanted.items() if key[0] != link_id}
        self._links.discard(link_id)
        self._waiting = {key: found for key, found in self._waiting.items() if key[0] != link_id}

    # A step.

    def next_batch(self, now_ns: int) -> Batch | None:
        """The batch of the step that has arrived; None if there is none, or its items have gone one by one because
        something else is due.
        """
        step = self.pending
        if step is None:
            return None
        if not self._scheduler.is_free:
            self._split_pending()
            return None
        self.pending = None
        if not step.is_asked and not self._has_fetched(step):
            return None
        return Batch([], now_ns, decode=step, num_running=len(step))

    def _has_fetched(self, step: DecodeBatch) -> bool:
        """Fetch the states of a begun step; False where that cannot be done."""
        if not isinstance(step.batched, ExtendBatch) or step.batched.states is None or self._references is None:
            return True
        fetched: Any = self._references.fetch_batch(step.batched, are_kept=True)
        step.batched = fetched
        return fetched.states.tensor is not None

    @property
    def is_ahead_due(self) -> bool:
        """True if a step may be begun by itself."""
        return self.ahead.is_due or self.is_chain_due

    @property
    def is_chain_due(self) -> bool:
        """True if a draft may go on from what it has sent."""
        return self.drafts.is_due or self._guesses.is_due

    def batch_ahead(self, now_ns: int) -> Batch | None:
        """The batch of the step that a target begins by itself, while nothing is in flight; None if there is none, or
        something else is due.
        """
        if not self.ahead.is_due or self.pending is not None or self.ahead.pause_ns():
            return None
        self.postprocess(goes_on=True)
        step = self.ahead.next_step(now_ns) if self._scheduler.is_free else None
        if step is None:
            self._take_claims()
        return None if step is None else Batch([], now_ns, decode=step, num_running=len(step))

    def give_up(self, batch: Batch, output: ExecutorOutput[Any]) -> bool:
        """Serve the claims of a step that was begun by itself and has failed as items; False for any other step."""
        step = batch.decode
        if step is None or step.is_asked or not isinstance(step.batched, ScoreBatch):
            return False
        self._running = None
        if output.postprocess is not None:
            output.postprocess()
        self._take_claims()
        return True

    def _take_claims(self) -> None:
        for link_id, item, arrived_ns in self.ahead.dissolve():
            self._take_item(link_id, item, arrived_ns)

    def chain_batch(self, now_ns: int) -> Batch | None:
        """The batch of the loop by which a draft goes on; None if there is none, or something else is due."""
        if not self.is_chain_due or self.pending is not None:
            return None
        self.postprocess()
        step = self.drafts.next_step(now_ns) or self._guesses.next_step(now_ns)
        return None if step is None else Batch([], now_ns, decode=step, num_running=len(step))

    def start(self, batch: Batch, step: DecodeBatch) -> None:
        """Start the forward, then note for each session that it runs."""
        if not self._executor.truncates_batch:
            self._sessions.truncate(step.sessions, step.kept.tolist())
        batch.forward = self._executor.start_step(step)
        self._running = batch
        if step.is_asked:
            self._note_asked(step)

    def _note_asked(self, step: DecodeBatch) -> None:
        if self._wanted:
            for key in step.keys:
                self._wanted.pop(key, None)
        if self.ahead.has_any:
            for key in step.keys:
                self.ahead.drop(key)
        elif isinstance(step.batched, ScoreBatch) and step.batched.begins_next:
            self.ahead.drop_pushes(step)
        for session, generation in zip(step.sessions, step.batched.generations.tolist(), strict=True):
            session.generation, session.used_ns = generation, step.arrived_ns
        self._scheduler.note_decode_batch(step)

    def answer(self, batch: Batch, step: DecodeBatch, output: ExecutorOutput[Any], ended_ns: int) -> Messages:
        """The answers of a step as a message; ``postprocess`` does the rest when it has left."""
        self._running = None
        forward = ForwardRecord(
            batch.started_ns, output.computed_ns, ended_ns, len(step), step.num_tokens, output.used_graph
        )
        batch.record = forward
        batched = output.batched
        if batched is None:
            raise TypeError("answers that are no columns go one by one")
        is_pushed = step is self.drafts.running or step is self._guesses.running
        self._answered = _Answered(step, batch, forward, step.bases.tolist(), output.postprocess, is_pushed)
        if step is self.drafts.running:
            return self.drafts.finish(step, batched)
        if step is self._guesses.running:
            self._guesses.finish(step, batched, forward)
            return []
        if not step.is_asked and isinstance(step.batched, ScoreBatch):
            return self.ahead.finish(step, batched, forward)
        if not step.is_asked:
            self._begun.hold(step, batched, forward)
            return []
        if isinstance(step.batched, ScoreBatch) and step.batched.begins_next:
            batched = replace(batched, draft_token_ids=step.batched.draft_token_ids)
            batched = self.ahead.go_on(step.link_id, batched, step.batched.channel)
        return self._outputs.batch_message(step, batched, forward, step.batched.trace_parents)

    def split_all(self) -> None:
        """Have requests for all that was asked, and expect no step."""
        self._expected.drop()
        if self.pending is not None:
            self._split_pending()
        self.split_running()

    def split_running(self) -> None:
        """Make the batch that runs one of requests, as if its items had come one by one."""
        batch = self._running
        if batch is None or batch.decode is None:
            return
        step, self._running, batch.decode = batch.decode, None, None
        scheduled: ScheduledTokens = []
        items: list[Any] = list(step.batched.items())
        for session, item in zip(step.sessions, items, strict=True):
            request: AnyRequest = Request(session, item, RunningJob(), step.arrived_ns, is_asked=step.is_asked)
            request.status = RequestStatus.RUNNING
            self._scheduler.queue.put(request)
            scheduled.append((request, len(item.token_ids) + len(getattr(item, "draft_token_ids", ()))))
        batch.scheduled = scheduled

    def _drop_begun_pending(self) -> None:
        """Drop the pending begun step, which has changed nothing yet: something is asked for."""
        if self.pending is not None and not self.pending.is_asked:
            self.pending = None

    def _split_pending(self) -> None:
        self._drop_begun_pending()
        step, self.pending = self.pending, None
        if step is not None:
            if step.plan is not None:
                self._executor.drop_plan(step.plan)
            for item in step.batched.items():
                self._take_item(step.link_id, item, step.arrived_ns)

    # When answers have left.

    def postprocess(self, *, goes_on: bool = False) -> None:
        """Do what no answer of a step waits for, and put its sessions down for the next one. ``goes_on``: a step is
        begun now, before the device computes; sessions that go on in it are not registered.
        """
        answered, self._answered = self._answered, None
        if answered is not None:
            if answered.postprocess is not None:
                answered.postprocess()
            if not answered.is_pushed:
                for session, base in zip(answered.step.sessions, answered.bases, strict=True):
                    self._sessions.commit(session, base)
            self._scheduler.note_decode_answers(answered.step, answered.batch, answered.forward)
            if goes_on and self.ahead.are_due(answered.step.keys):
                for key in answered.step.keys:
                    self._unregister(key)
            elif not answered.is_pushed:
                self._register(answered.step.own, answered.bases)

    def register(self, answered: Iterable[AnyRequest]) -> None:
        """Register the sessions of requests that were answered one by one, unless all of these are decode steps, which
        ``LookaheadSteps`` computes ahead.
        """
        own: dict[int, list[tuple[Session[Any], int]]] = {}
        drafting = set[int]()
        for request in answered:
            session, answer = request.session, request.answer
            if answer is None or isinstance(answer, CommonEvent) or not self._sessions.holds(session):
                continue
            link_id = session.link_id
            is_alone = link_id in self._links and self._scheduler.queue.first(session.key) is None
            if is_alone and self._executor.is_decoding(session):
                own.setdefault(link_id, []).append((session, answer.base_length))
                is_decode_step = len(request.item.token_ids) == 1 and not num_drafts(request.item)
                if not (is_decode_step and self._executor.may_be_plain(session)):
                    drafting.add(link_id)
            elif session.sequence.length > answer.base_length:  # there are drafts
                self._sessions.hash_ahead(session, answer.base_length)
        for link_id in drafting:
            sessions = [session for session, _ in own[link_id]]
            rows = self._executor.session_rows(sessions)
            self._register(RunningSessions.of(sessions, rows), [base for _, base in own[link_id]])

    def _register(self, own: RunningSessions, bases: Sequence[int]) -> None:
        waiting = WaitingSessions(self._sessions, own, bases)
        self._waiting.update({key: (waiting, row) for key, row in own.keys.items()})
