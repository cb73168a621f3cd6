"""The synchronous heart of a service: commands in, one forward a step, events out.

Owns the order of things: when what has arrived is taken in, when a forward begins and ends, and what becomes of its
results. Three rooms do the rest: ``Arrivals`` has what comes and what ends without an answer, ``Forwards`` one forward
after the other, ``Ahead`` what is computed before it is asked for. What is between them stands in the ``Agenda``. What
an item means and how its tokens are computed is the ``Stage``'s. Deterministic and without threads;
``outrider.engine.worker`` gives it one. Refuses to know models, devices and transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from outrider.engine.activity import Activity
from outrider.engine.agenda import Agenda
from outrider.engine.ahead import Ahead
from outrider.engine.arrivals import Arrivals
from outrider.engine.at_once import AtOnce
from outrider.engine.flights import Started
from outrider.engine.forwards import Budget, Ended, Forwards
from outrider.engine.idle import IdleSessions
from outrider.engine.ledger import Ledger, SessionKey
from outrider.engine.page_budget import PageBudget, Served
from outrider.engine.patience import Patience
from outrider.engine.pending import Pending
from outrider.engine.punctual import LOOK_S
from outrider.engine.scheduling import DEFAULT_PREFILL_BESIDE, is_running
from outrider.engine.stage import AheadStage, EventT, ItemT, JobT, Stage, TextT
from outrider.engine.telling import Telling, Told
from outrider.errors import OutriderError
from outrider.ports import Open, Rejected, Release
from outrider.recording import Recorder

DEFAULT_MAX_BATCHED_TOKENS = 1024
_MOST_TOLD = 32
"""Answers that need no forward go first, for no more steps in a row: who asks for nothing else holds up nobody."""


class ServiceCore(Generic[TextT, ItemT, JobT, EventT]):
    """Implements ``outrider.engine.worker.Core`` over a ledger and a stage."""

    def __init__(
        self,
        ledger: Ledger[TextT],
        stage: Stage[TextT, ItemT, JobT, EventT],
        *,
        ahead: AheadStage[TextT, ItemT, JobT, EventT] | None = None,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
        adapts_chunks: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``ahead`` is the stage once more, if it is to compute what was not asked for yet; ``adapts_chunks`` where a
        chunk's time is not its tokens' alone, as on a GPU.
        """
        self.ledger = ledger
        self.activity = activity = Activity()
        self._stage = stage = ahead or AtOnce(stage)
        self._clock = clock
        self._agenda: Agenda[TextT, ItemT, JobT, EventT] = Agenda()
        self._num_told = 0
        """So many steps in a row were spent on answers that needed no forward."""
        self._patience = Patience()
        self._telling: Telling[TextT, ItemT, JobT, EventT] = Telling(activity, clock, lambda: stage.num_pages_free)
        self._ahead = Ahead(stage, self._agenda, activity=activity, clock=clock)
        self._page_budget = PageBudget(ledger, stage, self._agenda, activity)
        budget = Budget(max_batched_tokens, max_prefill_beside, adapts_chunks)
        self._forwards = Forwards(
            stage, self._agenda, self._patience, budget, fit=self._fit, activity=activity, clock=clock
        )
        self._arrivals = Arrivals(
            ledger,
            stage,
            self._agenda,
            ahead=self._ahead,
            telling=self._telling,
            budget=self._page_budget,
            patience=self._patience,
            activity=activity,
        )
        self._idle = IdleSessions(
            ledger,
            ledger.session_limits.idle_timeout_s,
            is_busy=self._is_asked,
            end=self._arrivals.expire,
            clock=clock,
        )

    @property
    def recorder(self) -> Recorder | None:
        """Told of traced items; set before the first message, if at all."""
        return self._telling.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._telling.recorder = recorder

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self.ledger)

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._stage.num_pages_free

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._telling.has_any or self._agenda.due or self._forwards.under_way)

    @property
    def pause_s(self) -> float:
        """For how long there had better be no step, in seconds: while a forward is under way, and while prompts had
        better wait for running sessions.
        """
        return 0.0 if self._telling.has_any else self._rest_s

    def handle(
        self, link_id: int, commands: Sequence[Open | Release | Rejected | ItemT], *, arrived_ns: int | None = None
    ) -> None:
        """Take in one message of a link; computes nothing."""
        arrived = self._clock() if arrived_ns is None else arrived_ns
        for command in commands:
            if isinstance(command, Open):
                self._arrivals.open(link_id, command, arrived)
            elif isinstance(command, Release):
                self._arrivals.release(link_id, command)
            elif isinstance(command, Rejected):
                self._arrivals.reject(link_id, command)
            else:
                self._arrivals.item(link_id, command, arrived)
        if (started := self._forwards.under_way) is not None:
            started.may_be_followed = started.following is None

    @property
    def next_check_s(self) -> float | None:
        """Seconds until ``end_idle_sessions`` is due; None while there are no sessions."""
        return self._idle.next_check_s

    def end_idle_sessions(self) -> None:
        """End the sessions for which nothing has come for too long."""
        self._idle.end_all()

    def refuse_sessions(self, reason: str) -> None:
        """Refuse new sessions from now on."""
        self.ledger.refuse_sessions(reason)

    def drop_link(self, link_id: int) -> None:
        """Release everything that the link holds."""
        self._arrivals.drop_link(link_id)

    def step(self) -> Told[EventT]:
        """Answers that needed no forward, if there are any; otherwise one forward and what it answers. A forward that
        goes on by itself is begun, followed by another and ended in steps of their own, so that what arrives meanwhile
        is taken in.
        """
        if self._telling.has_any and not (self._num_told >= _MOST_TOLD and self._may_go_on):
            self._num_told += 1
            return self._telling.take()
        self._num_told = 0
        started = self._forwards.under_way
        if started is None:
            self._forwards.start()
            started = self._forwards.under_way
            if started is None or self._forwards.go_on_alone:
                return []
        elif started.may_be_followed:
            self._ahead.follow(started)
            if started.following is not None or not started.flight.is_done():
                return []
        return self._end(started)

    def _is_asked(self, key: SessionKey) -> bool:
        """Whether a session waits for an answer."""
        due = self._agenda.due_of(key)
        return due is not None and due.foreseen is None

    def _fit(self, served: Served[TextT, ItemT, JobT, EventT]) -> Served[TextT, ItemT, JobT, EventT]:
        """What of a forward there are pages for, once the youngest sessions were preempted where that is needed."""
        return self._page_budget.make_room(served, self._arrivals.preempt)

    @property
    def _may_go_on(self) -> bool:
        """Whether a forward is to be begun, followed or ended now."""
        return bool(self._agenda.due or self._forwards.under_way) and not self._rest_s

    @property
    def _rest_s(self) -> float:
        """For how long there had better be no forward begun, followed or ended."""
        if (started := self._forwards.under_way) is not None:
            return 0.0 if started.may_be_followed or started.flight.is_done() else LOOK_S
        if any(is_running(pending.job) for pending in self._agenda.due):
            return 0.0
        return 1e-9 * self._patience.wait_ns(self._clock())

    def _end(self, started: Started[TextT, ItemT, JobT, EventT]) -> Told[EventT]:
        """The forward under way, to its end; what comes next is begun."""
        answered = self._settle(self._forwards.end(started))
        # Before the answers are put into words: the device need not wait for that.
        self._forwards.under_way = self._ahead.board(started)
        self._arrivals.take_overtaking(started.pendings)
        if self._forwards.under_way is None:
            foreseen = [self._ahead.foresee(pending) for pending in started.pendings]
            if any(foreseen) and self._forwards.go_on_alone:
                self._forwards.start()
        return self._telling.batches(answered)

    def _settle(self, ended: Ended[TextT, ItemT, JobT, EventT]) -> list[Pending[TextT, ItemT, JobT, EventT]]:
        """Those who asked and are answered now."""
        answered = []
        for pending, result in zip(ended.started.pendings, ended.results, strict=True):
            if not self._agenda.take(pending):
                continue  # given up while the forward was under way
            if result is None:
                self._agenda.put(pending)  # to the back
            elif pending.foreseen is not None:
                self._ahead.keep(pending, result)
            else:
                self._answer(pending, result, ended.ended_ns)
                answered.append(pending)
        return answered

    def _answer(
        self, pending: Pending[TextT, ItemT, JobT, EventT], result: EventT | OutriderError, now_ns: int
    ) -> None:
        if isinstance(result, OutriderError):
            pending.answer = self._arrivals.fail(pending, result)
        else:
            pending.answer = self._ahead.as_asked(pending, result)
            self.ledger.commit(pending.session, result.base_length)
            self._patience.note_answer(pending.session.key, now_ns)
