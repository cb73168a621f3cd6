"""A coordinator of random sessions, which knows what a target that computes nothing ahead would answer."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outrider.model_executor.input_batch import ForwardRow
from outrider.ports import Open, Preempted, Prepare, Refused, Release, Score, Scores, SessionFailed
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, JudgingRule, SamplingParams, Support
from outrider_target.executor import TargetExecutor, next_token
from tests.serving.lookahead.device import MAX_LENGTH, PAGE_SIZE, VOCAB_SIZE, Runner
from tests.support.core_driver import Driver, open_session, score_item

REJECTION, COUPLED, TYPICAL = AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL
GRAMMAR = Grammar(GrammarKind.REGEX, "([a-p]+[q-z0-9A-C]{1,3})*")
PLAIN: list[tuple[AcceptanceMethod, dict[str, Any], dict[str, Any]]] = [
    (REJECTION, {"temperature": 0.0}, {}),
    (REJECTION, {"temperature": 0.9, "top_p": 0.9}, {}),
    (COUPLED, {"temperature": 0.8}, {}),
    (TYPICAL, {"temperature": 0.7}, {}),
    (REJECTION, {"temperature": 0.0, "grammar": GRAMMAR}, {}),
    (COUPLED, {"temperature": 0.8, "grammar": GRAMMAR}, {}),
]
ODD: list[tuple[AcceptanceMethod, dict[str, Any], dict[str, Any]]] = [
    (REJECTION, {"temperature": 0.0, "repetition_penalty": 1.3, "bad_words": ((3, 4), (7,))}, {}),
    (REJECTION, {"temperature": 0.0}, {"num_logprobs": 2}),
    (COUPLED, {"temperature": 1.0}, {"num_prompt_logprobs": 1}),
    (TYPICAL, {"temperature": 0.7, "min_tokens": 5}, {}),
]
Command = Open | Release | Score | Prepare
MOST_SESSIONS, LONGEST_WAIT = 5, 40
_BATCH = 12
"""Tokens: prompts come in chunks."""


def core_of(
    executor: TargetExecutor, *, lookahead: bool, max_batched_tokens: int = _BATCH
) -> EngineCore[Any, Any, Any, Any]:
    sessions = SessionRegistry(executor.runner.sequences, Limits(VOCAB_SIZE, MAX_LENGTH, trims=False))
    return EngineCore(sessions, executor, TokenBudget(max_batched_tokens), lookahead=lookahead)


@dataclass(frozen=True)
class Kind:
    """Behaviour of sessions for a while."""

    is_calm: bool = False
    """Few come and go, and all ask at once."""
    has_drafts: bool = False
    is_odd: bool = False
    """Some want what takes the host."""


CALM = Kind(is_calm=True)
KINDS = (CALM, Kind(is_odd=True), CALM, Kind(), CALM, Kind(has_drafts=True, is_odd=True))


@dataclass
class Asked:
    """An item, and all of the text before its drafts."""

    item: Score
    text: tuple[int, ...]
    wait: int = 0


@dataclass
class OneSession:
    """Session as its coordinator knows it."""

    opened: Open
    tokens: list[int]
    held: int = 0
    """Tokens that the target has for sure."""
    newest: Asked | None = None
    asked: dict[int, Asked] = field(default_factory=dict)
    """All since it was opened, by generation."""


class Coordinator:
    """One link."""

    most_sessions = MOST_SESSIONS
    share_traced = 0.5

    def __init__(self, core: EngineCore[Any, Any, Any, Any], link_id: int, choose: random.Random) -> None:
        self.driver = Driver(core, link_id)
        self.sessions: dict[int, OneSession] = {}
        self.num_checked = self.num_preempted = 0
        self._choose = choose
        self._generations = itertools.count(1)

    def act(self, kind: Kind) -> None:
        """A message of some commands."""
        commands: list[Command] = []
        if len(self.sessions) < self.most_sessions and self._choose.random() < (0.05 if kind.is_calm else 0.2):
            number = next(i for i in range(self.most_sessions) if i not in self.sessions)
            commands += self._open(number, is_odd=kind.is_odd)
        for number, session in list(self.sessions.items()):
            chance = self._choose.random() * (10 if kind.is_calm else 1)
            if chance < 0.01:
                commands += self._open(number, is_odd=kind.is_odd)
            elif chance < 0.02:
                commands.append(self._release(number))
            elif session.newest is None and (chance < 0.8 or kind.is_calm):
                commands += self._ask(session, drafts=kind.has_drafts)
            elif session.newest is not None and chance < 0.05:
                self._change_mind(session)
                commands += self._ask(session, drafts=kind.has_drafts)
        if commands:
            self.send(*commands)

    def send(self, *commands: Command) -> None:
        """A message."""
        self.driver.send(*commands)

    def release_all(self) -> None:
        self.send(*[self._release(number) for number in list(self.sessions)])

    def take(self, event: Any) -> None:
        """Check of an event against the expected one."""
        session = self.sessions.get(event.session)
        if isinstance(event, Refused | Preempted):
            if session is not None and session.opened.generation <= event.generation:
                self.num_preempted += isinstance(event, Preempted)
                del self.sessions[event.session]
            return
        if session is None or event.generation not in session.asked:
            return  # it crossed what ended the session
        asked = session.asked[event.generation]
        expected = reference(session.opened, asked)
        assert written(event) == pytest.approx(written(expected), rel=1e-4, nan_ok=True), (asked, event, expected)
        self.num_checked += 1
        if isinstance(event, SessionFailed):
            del self.sessions[event.session]
        elif session.newest is asked:
            self._go_on(session, asked, event)

    def check_waits(self) -> None:
        for session in self.sessions.values():
            if session.newest is not None:
                session.newest.wait += 1
                assert session.newest.wait < LONGEST_WAIT, session

    def _open(self, number: int, *, is_odd: bool) -> list[Command]:
        prompt = self._tokens(self._choose.choice((1, 3, 5, 20)))
        method, sampling, more = self._choose.choice(ODD if is_odd and self._choose.random() < 0.5 else PLAIN)
        opened = open_session(
            number, generation=next(self._generations), prompt_length=len(prompt), num_token_ids=VOCAB_SIZE - 1,
            max_length=self._choose.randint(len(prompt) + 1, MAX_LENGTH), seed=self._choose.randrange(99),
            acceptance_method=method, sampling=SamplingParams(**sampling), eos_token_ids=(5,), **more,
        )  # fmt: skip
        self.sessions[number] = OneSession(opened, prompt)
        return [opened, *(self._ask(self.sessions[number], drafts=False) if self._choose.random() < 0.8 else [])]

    def _release(self, number: int) -> Release:
        del self.sessions[number]
        return Release(number, next(self._generations))

    def _ask(self, session: OneSession, *, drafts: bool) -> list[Command]:
        opened, tokens = session.opened, session.tokens
        base = min(session.held, len(tokens) - 1)
        # A prompt whose logprobs are wanted is cut by one token more, so that who asks again may find it too short.
        if opened.num_prompt_logprobs is None and self._choose.random() < 0.03:
            base = self._choose.randint(0, base)
        room = opened.max_length - len(tokens)
        ids = self._tokens(min(room, self._choose.randint(0, 3))) if drafts and self._choose.random() < 0.5 else []
        support = self._support(ids) if ids and opened.judging_rule is JudgingRule.REJECTION else None
        generation = next(self._generations)
        item = score_item(opened.session, generation, tokens, ids, num_kept_tokens=base, support=support)
        if self._choose.random() < self.share_traced:
            item = dataclasses.replace(item, trace_parent=f"00-{self.driver.link_id:016x}{generation:016x}-{1:016x}-01")
        session.held = base
        session.newest = session.asked[generation] = Asked(item, tuple(tokens))
        return [item, *self._credit(opened.session, generation)]

    def _credit(self, session: int, generation: int) -> list[Command]:
        """Mostly a little; now and then none, or for an item that is not the newest."""
        if self._choose.random() < 0.2:
            return []
        stale = self._choose.random() < 0.05
        return [Prepare(session, generation - stale, self._choose.choice((0, 1, 2, 5, 50)))]

    def _change_mind(self, session: OneSession) -> None:
        """Perhaps about the last token too."""
        if self._choose.random() < 0.5:
            session.tokens[-1] = self._tokens(1)[0]
            session.held = min(session.held, len(session.tokens) - 1)

    def _go_on(self, session: OneSession, asked: Asked, event: Scores) -> None:
        drafts = asked.item.draft_token_ids
        kept = self._choose.randint(0, len(drafts))
        token_id = next_token(event.form) if self._choose.random() < 0.97 else None
        session.held = len(session.tokens) + kept
        session.tokens += [*drafts[:kept], self._tokens(1)[0] if token_id is None else token_id]
        session.newest = None
        room = session.opened.max_length - len(session.tokens)
        is_over = room < 0 or token_id in session.opened.eos_token_ids
        if is_over or (room == 0 and self._choose.random() < 0.5):
            self.send(self._release(asked.item.session))

    def _tokens(self, count: int) -> list[int]:
        return [self._choose.randrange(VOCAB_SIZE - 1) for _ in range(count)]

    def _support(self, drafts: list[int]) -> Support:
        rows = [sorted({token_id, *self._tokens(2)}) for token_id in drafts]
        return Support(
            np.array([len(row) for row in rows], dtype=np.int32),
            np.array([token_id for row in rows for token_id in row], dtype=np.int32),
        )


def reference(opened: Open, asked: Asked) -> Any:
    """The answer to the same question, asked of a target that does nothing else."""
    text, item = asked.text, asked.item
    runner = Runner(MAX_LENGTH // PAGE_SIZE)
    driver = Driver(core_of(TargetExecutor(runner), lookahead=False))  # type: ignore[arg-type]
    driver.send(opened)
    session = driver.core.sessions.get(driver.link_id, item.session)
    assert session is not None
    if item.num_kept_tokens:
        runner.forward([ForwardRow(session.sequence, text[: item.num_kept_tokens], 0)])
    return driver.one(item)


def written(event: Any) -> list[float]:
    """All that is in an event, one after the other, in numbers."""
    return list(_parts(event))


def _parts(value: Any) -> Iterator[float]:
    if isinstance(value, np.ndarray):
        yield from value.ravel().tolist()
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _parts(one)
    elif dataclasses.is_dataclass(value):
        yield from _parts(type(value).__name__)
        for one in dataclasses.fields(value):
            yield from _parts(getattr(value, one.name))
    elif isinstance(value, str):
        yield zlib.crc32(value.encode())
    else:
        yield -1 if value is None else value
