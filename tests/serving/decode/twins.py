"""Two cores over the same model, one of which takes arrays as decode batches: a random load that both get, as bytes.

Owns what is asked, sound and unsound, and that both say the same and hold the same after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.batched import CommandBatch
from outrider.ports import EventBatch, Extend, Open, Opened, Prepare, Proposal, Release, Score, Scores
from outrider.prefix_hash import PrefixHash, prefix_hash
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.engine_core import EngineCore
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.transport.convert.events import (
    draft_events_from_proto,
    draft_events_to_proto,
    target_events_from_proto,
    target_events_to_proto,
)
from outrider.types import AcceptanceMethod, JudgingRule, SamplingParams, SparseScores, Support, TokenScores
from outrider.v1 import link_pb2 as pb
from tests.support.core_driver import open_session
from tests.support.equality import same

MOST_SESSIONS, MAX_LENGTH, MOST_DRAFTS = 9, 300, 5
Samplings = Sequence[tuple[SamplingParams, AcceptanceMethod]]
GREEDY = ((SamplingParams(temperature=0.0), AcceptanceMethod.REJECTION),)
TOKENS = (*GREEDY, (SamplingParams(temperature=1.0), AcceptanceMethod.COUPLED))
SAMPLED = (
    (SamplingParams(temperature=1.0), AcceptanceMethod.REJECTION),
    (SamplingParams(temperature=0.7, top_p=0.8, top_k=20), AcceptanceMethod.REJECTION),
    (SamplingParams(temperature=0.9, min_p=0.05, frequency_penalty=0.5), AcceptanceMethod.REJECTION),
)


class Held:
    """A forward that ends when it is told to."""

    def __init__(self, forward: Any, switch: Switch, *, is_held: bool) -> None:
        self._forward, self._switch, self._is_held = forward, switch, is_held

    def is_done(self) -> bool:
        return self._switch.is_on or not self._is_held

    def finish(self) -> Any:
        return replace(self._forward.finish(), computed_ns=self._switch.now_ns)


class Switch:
    """Clock of both cores, and whether forwards end: scheduling depends on it."""

    is_on = True
    now_ns = 0

    def clock(self) -> int:
        return self.now_ns


def holding(kind: type[Any], switch: Switch, *, asynchronous: bool = True) -> type[Any]:
    """The executor with forwards that go on until the switch is on; it counts steps of arrays, those of them that
    were planned before, and plans that were not used. One that is not ``asynchronous`` ends each forward at once.
    """

    class Holding(kind):  # type: ignore[misc]
        num_columns = num_plain = num_planned = num_forgotten = 0
        is_asynchronous = asynchronous

        def start(self, batch: Any) -> Any:
            return Held(super().start(batch), switch, is_held=asynchronous)

        def start_step(self, step: Any, batch: Any = ()) -> Any:
            is_decoding = isinstance(step, LookaheadStep)
            Holding.num_plain += is_decoding
            Holding.num_columns += not is_decoding
            Holding.num_planned += step.plan is not None
            return Held(super().start_step(step, batch), switch, is_held=asynchronous)

        def drop_plan(self, plan: Any) -> None:
            Holding.num_forgotten += 1
            super().drop_plan(plan)

    return Holding


@dataclass
class Known:
    """A session as its coordinator knows it."""

    number: int
    tokens: list[int]
    max_length: int
    held: int = 0
    asked: int = 0
    drafts: Sequence[int] = ()
    is_new: bool = True
    is_sampled: bool = False
    """True if scores are about supports."""


class Twins:
    """The cores and what they are asked; ``steady`` takes arrays."""

    max_length = MAX_LENGTH
    prompt_lengths: tuple[int, ...] = (2, 7, 30, 252)

    def __init__(
        self, role: str, steady: EngineCore[Any, Any, Any, Any], plain: EngineCore[Any, Any, Any, Any],
        switch: Switch, seed: int, *, num_token_ids: int, samplings: Samplings = GREEDY,
    ) -> None:  # fmt: skip
        self.role, self.cores, self.switch = role, (steady, plain), switch
        self.outcomes: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._num_token_ids, self._samplings = num_token_ids, samplings
        self._sessions: dict[int, Known] = {}
        self._generation = self._next_number = self._link_id = 0
        self._oddity = 0.0

    def run(self, num_rounds: int) -> None:
        """Random rounds; in order for some time and then not, in turns."""
        for index in range(num_rounds):
            self._oddity = 0.0 if index // 25 % 2 else 0.08
            self._round()
        for core in self.cores:
            core.drop_link(self._link_id)
        self.switch.is_on = True
        self._step_all()

    def begin_beside_a_split_step(self) -> None:
        """Release of a session, and arrival of a prompt, while a step runs."""
        for _ in range(12):
            self._round()
        first, *_ = [session for session in self._sessions.values() if not session.is_new]
        self._send([self._item(session) for session in self._sessions.values()])
        self.switch.is_on = False
        self._step()
        del self._sessions[first.number]
        self._send([Release(first.number, self._new_generation())])
        self._open()
        self._send([self._item(session) for session in self._sessions.values() if session.is_new])
        self.switch.is_on = True
        self._step_all()

    def _round(self) -> None:
        while len(self._sessions) < 5 or (len(self._sessions) < MOST_SESSIONS and self._chance(0.1)):
            self._open()
        if self._chance(self._oddity / 8):
            self._drop_link()
            return
        idle = [session for session in self._sessions.values() if not session.asked]
        self._random.shuffle(idle) if self._chance(0.2) else None
        if self._chance(2 * self._oddity):
            idle = idle[: self._random.randint(0, len(idle))]
        self._send([self._item(session) for session in idle])
        self.switch.is_on = self._chance(0.5)
        self._step()
        self._meanwhile()
        self._step()
        self.switch.is_on = True
        self._step_all()

    def _open(self) -> None:
        sampling, method = self._random.choice(self._samplings)
        session = Known(self._next_number, self._new_tokens(self._random.choice(self.prompt_lengths)), self.max_length)
        self._next_number += 1
        self._sessions[session.number] = session
        num_logprobs = {1: 0, 2: 2}.get(session.number % 8) if self.role == "target" else None
        opening: Open = open_session(
            session.number, prompt_length=len(session.tokens), max_length=self.max_length,
            num_token_ids=self._num_token_ids, generation=self._new_generation(), sampling=sampling,
            acceptance_method=method, seed=session.number, num_logprobs=num_logprobs,
        )  # fmt: skip
        session.is_sampled = opening.judging_rule is JudgingRule.REJECTION
        self._send([self._dressed(opening)])

    def _dressed(self, opening: Open) -> Open:
        return opening

    def _drop_link(self) -> None:
        for core in self.cores:
            core.drop_link(self._link_id)
        self._link_id += 1
        self._sessions.clear()
        self._compare_books()

    def _meanwhile(self) -> None:
        """Random events while a forward is in flight, or between two steps."""
        if not self._sessions or not self._chance(3 * self._oddity):
            return
        session = self._random.choice(list(self._sessions.values()))
        what = self._random.randrange(5)
        if what == 0:
            del self._sessions[session.number]
            self._send([Release(session.number, self._new_generation())])
        elif what == 1:
            self._send([self._item(session)])
        elif what == 2:
            self._send([self._item(each) for each in self._sessions.values()])
        elif what == 3 and self.role == "target":
            self._send([Prepare(session.number, session.asked, 3)])
        else:
            self._open()

    def _item(self, session: Known) -> Extend | Score:
        session.asked = self._new_generation()
        kept = min(session.held, len(session.tokens) - 1)
        if self._chance(self._oddity / 2) and kept > 3:  # a rollback
            kept = self._random.randint(1, kept)
        if session.is_new:
            kept = 0
        digest, given = self._hash(session.tokens[:kept]), tuple(session.tokens[kept:])
        if self.role == "draft":
            length = 0 if self._chance(self._oddity) else self._random.randint(1, MOST_DRAFTS)
            item: Extend | Score = Extend(session.number, session.asked, kept, digest, given, length)
        else:
            most = min(MOST_DRAFTS, self.max_length - len(session.tokens))
            session.drafts = self._new_tokens(0 if self._chance(self._oddity / 2) else self._random.randint(1, most))
            support = self._support(session.drafts) if session.is_sampled and session.drafts else None
            item = Score(session.number, session.asked, kept, digest, given, tuple(session.drafts), support)
        session.held = kept
        return self._broken(item) if self._chance(self._oddity / 3) else item

    def _hash(self, tokens: Sequence[int]) -> PrefixHash:
        return prefix_hash(tokens)

    def _support(self, drafts: Sequence[int]) -> Support:
        rows = [sorted({token_id, *self._new_tokens(self._random.randrange(4))}) for token_id in drafts]
        return Support(
            np.array(list(map(len, rows)), dtype=np.int32),
            np.array([token_id for row in rows for token_id in row], dtype=np.int32),
        )

    def _broken(self, item: Extend | Score) -> Extend | Score:
        """The item with something wrong."""
        changes: list[dict[str, Any]] = [
            {"prefix_hash": (item.prefix_hash[0], item.prefix_hash[1] + 1)},
            {"generation": max(0, item.generation - self._random.randint(1, 40))},
            {"num_kept_tokens": min(item.num_kept_tokens + 40, 255)},
            {"token_ids": (*item.token_ids, self._num_token_ids + 5000)},
            {"token_ids": ()},
            {"session": 10_000},
        ]
        if isinstance(item, Score):
            changes += [{"draft_token_ids": (self._num_token_ids,), "support": None}]
            if item.support is not None:
                unknown = item.support.token_ids + self._num_token_ids
                changes += [{"support": None}, {"support": replace(item.support, token_ids=unknown)}]
        change = self._random.choice(changes)
        if "num_kept_tokens" in change and item.prefix_hash[0]:
            return item  # its hash would have no chain
        return replace(item, **change)

    # Both cores.

    def _send(self, commands: Sequence[Any]) -> None:
        if not commands:
            return
        if self.role == "draft":
            content = draft_commands_to_proto(commands).SerializeToString()
            read = draft_commands_from_proto(pb.DraftCommands.FromString(content))
        else:
            content = target_commands_to_proto(commands).SerializeToString()
            read = target_commands_from_proto(pb.TargetCommands.FromString(content))
        self.outcomes["columns"] += any(isinstance(command, CommandBatch) for command in read)
        self._deliver(read)

    def _deliver(self, commands: Sequence[Any]) -> None:
        for core in self.cores:
            core.handle(self._link_id, commands)

    def _step_all(self) -> None:
        while any(core.has_work for core in self.cores):
            self._step()

    def _step(self) -> None:
        if not any(core.has_work for core in self.cores):
            return
        said = []
        self.switch.now_ns += 1_000_000
        for core in self.cores:
            messages = core.step()
            said.append([(link_id, *self._as_read(batch)) for link_id, batch in messages])
            self.outcomes["answers in columns"] += sum(len(batch.batched) for _, batch in messages)
            core.post_step()
        assert same(said[0], said[1]), said
        self._compare_books()
        for _, events, *_ in said[0]:
            for event in events:
                self._take(event)

    def _as_read(self, batch: EventBatch[Any]) -> tuple[Any, ...]:
        """Events as a coordinator reads them, and what is reported."""
        if self.role == "draft":
            read: EventBatch[Any] = draft_events_from_proto(draft_events_to_proto(batch))
        else:
            read = target_events_from_proto(target_events_to_proto(batch))
        assert not read.timings or len(read.timings) == len(read.events)
        found = sorted(read.all_events(), key=lambda event: (event.session, event.generation))
        assert same(found, sorted(batch.all_events(), key=lambda event: (event.session, event.generation)))
        report = read.report
        assert report is None or not report.batch_size or report.ended_ns > 0
        # Every job of the stand-in that drafts is of one token.
        num_tokens = 0 if report is None or self.role == "draft" else report.num_tokens
        num_free = report.num_pages_free if report is not None else 0
        return found, num_tokens, report and (report.batch_size, num_free)

    def _compare_books(self) -> None:
        if any(core.decode.pending is not None for core in self.cores):
            return  # a step that waits for events to leave has not changed its sessions, and single items have
        books = []
        for core in self.cores:
            sessions = core.sessions.sessions()
            assert core.decode._waiting.keys() <= {one.key for one in sessions}
            books.append(
                [
                    (one.key, one.generation, one.lookahead_credit, list(one.sequence.token_ids),
                     self._pages_of(one.sequence))
                    for one in sessions
                ]
            )  # fmt: skip
            if (runner := getattr(core.executor, "runner", None)) is not None:
                runner.sequences.check_integrity()
        assert books[0] == books[1]

    def _take(self, event: Any) -> None:
        self.outcomes[type(event).__name__] += 1
        session = self._sessions.get(event.session)
        if session is None or isinstance(event, Opened) or event.generation != session.asked:
            return
        if not isinstance(event, Proposal | Scores):
            del self._sessions[session.number]
            self._send([Release(session.number, self._new_generation())])
            return
        session.asked, session.is_new = 0, False
        base = len(session.tokens)
        drafts = event.token_ids if isinstance(event, Proposal) else session.drafts
        accepted = self._random.randint(0, len(drafts))
        if isinstance(event, Scores):
            assert isinstance(event.form, TokenScores | SparseScores)
            own = event.form.token_ids if isinstance(event.form, TokenScores) else event.form.outside_token_ids
            assert len(own) == len(drafts) + 1
            self.outcomes["logprobs"] += bool(event.logprobs)
            session.held, following = base + accepted, max(0, int(own[accepted]))
        else:
            session.held, following = self._held_after(base, accepted, len(drafts)), self._new_tokens(1)[0]
        session.tokens += [*drafts[:accepted], following]
        if len(session.tokens) > self.max_length - 2 * MOST_DRAFTS:
            del self._sessions[session.number]
            self._send([Release(session.number, self._new_generation())])

    def _held_after(self, base: int, num_accepted: int, num_drafts: int) -> int:
        """Tokens that a draft holds after a verdict: of its own it has computed all but the last."""
        return base + min(num_accepted, max(0, num_drafts - 1))

    def _pages_of(self, sequence: Any) -> list[int]:
        """Pages of a sequence, for a target their number alone: the order in which pages are released varies."""
        pages = list(getattr(sequence, "page_table", ()))
        return [len(pages)] if self.role == "target" else pages

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _new_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._num_token_ids) for _ in range(count)]

    def _new_generation(self) -> int:
        self._generation += 1
        return self._generation


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
