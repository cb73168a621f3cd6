"""Drafts ahead: draft loops that follow from a target's verdicts alone, and push what they draw.

A session's chain begins with proposals that were sent to a target directly. The draft goes on from them as if all were
accepted; what it draws first is its guess of the target's next token. Each verdict makes one loop due: from what was
pushed for just this outcome (``branches``), else from the text that the verdict names. All sessions that are due share
a loop. A verdict on another text ends the session's chain; so does any command for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.batched import U4, U8
from outrider.errors import OutriderError
from outrider.ports import EventBatch, Extend, Proposal
from outrider.proposal_channel.pushes import ChainStart, Pushes
from outrider.proposal_channel.verdicts import Verdicts
from outrider.serving.decode.branches import Branch, Choice, Drawn, Outcome
from outrider.serving.decode.sessions import LastSessions
from outrider.serving.decode.step import DecodeBatch, extend_batch
from outrider.serving.executor import Executor
from outrider.serving.output_processor import Messages, OutputProcessor
from outrider.serving.request import AnyRequest
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_table import SessionTable
from outrider.serving.stats import ServiceStats

_MAX_BROUGHT = 2
"""Tokens that one loop takes in of a session."""


@dataclass(slots=True)
class _Chain:
    """One session's chain."""

    session: Session[Any]
    channel: int
    base: int
    """Length of the text whose next tokens the target computes now."""
    draft_length: int
    num_outcomes: int
    """Outcomes of a step that are prepared, at most."""
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    """Pushed outcomes, by the length of the text before the guess and the guess."""
    branches: list[Any] = field(default_factory=list)
    """Sequences of all outcomes but the session's own."""
    choices: Sequence[Choice] = ()
    """Outcomes that the next loop may prepare beside its own."""
    brought: list[int] = field(default_factory=list)
    """Tokens that the next loop takes in; empty: none is due."""
    kept: int = 0
    """Tokens that it keeps before them."""
    length: int = 0
    """Tokens of the text before the guess that the next loop draws first."""

    @property
    def num_drawn(self) -> int:
        """Tokens that the next loop draws: a guess, and the draft tokens, of which a coordinator wants all or none."""
        return self.draft_length + 1

    @property
    def is_at_end(self) -> bool:
        """True if a loop would have nothing to draw."""
        longest = min(self.session.open.max_length, self.session.reserved_length + 1)
        return self.kept + len(self.brought) >= longest

    def follow(self, base: int, accepted: int, last: int, following: int) -> Outcome | None:
        """Make the loop due that follows from a verdict; the outcome, if it was prepared. Nothing is due then where the
        chain ends.
        """
        found = self.outcomes.get((base + accepted, following)) if base == self.base else None
        self.outcomes, self.choices = {}, ()
        if found is not None:
            self._go_on(found)
        elif base == self.base:
            self._miss(base + accepted, last if accepted or not self.brought else self.brought[-1], following)
        else:
            self.brought = []
        return found

    def _go_on(self, outcome: Outcome) -> None:
        token_ids = outcome.token_ids
        self.base = outcome.length + 1
        self.kept, self.brought = outcome.length + len(token_ids) - 1, token_ids[-1:]
        self.length = self.kept + 1
        self.choices = outcome.choices(self.num_outcomes - 1)

    def _miss(self, text: int, last: int, following: int) -> None:
        self.base = self.length = text + 1
        self.kept = min(text, self.session.sequence.length)
        num_lacking = text - self.kept + 1
        self.brought = [last, following][-num_lacking:] if num_lacking <= _MAX_BROUGHT else []


class DraftsAhead:
    """The chains of one core."""

    def __init__(
        self,
        sessions: SessionTable[Any],
        executor: Executor[Any, Any, Any, Any],
        scheduler: Scheduler,
        outputs: OutputProcessor,
        stats: ServiceStats,
    ) -> None:
        self._sessions, self._executor, self._stats = sessions, executor, stats
        self._scheduler, self._outputs = scheduler, outputs
        scheduler.lookahead.take_guess = self._take_guess
        self._chains: dict[SessionKey, _Chain] = {}
        self._verdicts: list[tuple[int, Verdicts]] = []
        """Verdicts that have come and are not followed yet, each with its link."""
        self._last = LastSessions(executor.session_rows)
        self.running: DecodeBatch | None = None
        self._rows: list[tuple[_Chain, Branch | None]] = []
        """Chain of each row of it, and the branch; None: the session's own row."""

    @property
    def is_due(self) -> bool:
        """True if a loop may be begun."""
        return bool(self._verdicts) or any(chain.brought for chain in self._chains.values())

    def start(self, link_id: int, start: ChainStart) -> Iterator[SessionKey]:
        """Begin chains; the sessions."""
        for number, generation, base, accepted, last, _ in _rows(start.verdicts):
            session = self._sessions.get(link_id, number)
            if session is None or generation != session.generation + 1 or not self._executor.follows_verdicts(session):
                continue
            if session.sequence.length == base + accepted - 1:
                chain = _Chain(session, start.channel, base, accepted, start.num_outcomes)
                chain.kept, chain.brought, chain.length = base + accepted - 1, [last], base + accepted
                self.forget(session.key)
                self._chains[session.key] = chain
                yield session.key

    def take(self, link_id: int, verdicts: Verdicts) -> bool:
        """Note verdicts if a chain may follow from one of them."""
        is_known = any((link_id, number) in self._chains for number in verdicts.sessions.tolist())
        if is_known:
            self._verdicts.append((link_id, verdicts))
        return is_known

    def _follow(self, now_ns: int) -> None:
        noted, self._verdicts = self._verdicts, []
        for link_id, verdicts in noted:
            for number, _, *verdict in _rows(verdicts):
                chain = self._chains.get((link_id, number))
                if chain is None:
                    continue
                chain.session.used_ns = now_ns
                outcome = chain.follow(*verdict)
                self._stats.num_lookahead_used += outcome is not None
                self._stats.num_lookahead_unused += outcome is None
                if outcome is not None and outcome.branch is not None:
                    chain.branches.remove(outcome.branch)
                    self._executor.take_branch(chain.session, outcome.branch)
                self._drop_branches([chain])
                if not chain.brought or chain.is_at_end:
                    del self._chains[link_id, number]

    def _drop_branches(self, chains: Iterable[_Chain]) -> None:
        for chain in chains:
            for branch in chain.branches:
                self._executor.drop_branch(branch)
            chain.branches.clear()

    def next_step(self, now_ns: int) -> DecodeBatch | None:
        """The loop of all sessions of one channel that are due, the one served longest ago; None where there is none.
        Sessions whose tokens are not drawn in loops get requests.
        """
        self._follow(now_ns)
        for chain in [chain for chain in self._chains.values() if chain.brought]:
            if not self._executor.is_decoding(chain.session):
                self._request(chain)
        due = [chain for chain in self._chains.values() if chain.brought and self._executor.is_decoding(chain.session)]
        if not due:
            return None
        link_id = due[0].session.link_id
        due = [chain for chain in due if chain.session.link_id == link_id and chain.channel == due[0].channel]
        step = self._step(link_id, due, now_ns)
        for chain in due:
            chain.brought = []
            if step is None:
                self.forget(chain.session.key)
            else:  # the last of all now
                self._chains[chain.session.key] = self._chains.pop(chain.session.key)
        self.running = step
        return step

    def _request(self, chain: _Chain) -> None:
        session, kept, brought = chain.session, chain.kept, tuple(chain.brought)
        if self._scheduler.queue.due_of(session.key) is not None:
            return  # the loop before has not ended
        chain.brought = []
        prefix_hash = self._sessions.prefix_hash(session, kept)
        item = Extend(session.open.session, session.generation, kept, prefix_hash, brought, chain.num_drawn)
        if self._sessions.rewind(session, kept, prefix_hash) is not None or self._is_invalid(session, item):
            self.forget(session.key)
            return
        self._scheduler.lookahead.begin(session, item, is_guess=True)

    def _is_invalid(self, session: Session[Any], item: Extend) -> bool:
        try:
            return self._executor.check(session, item) is not None
        except OutriderError:
            return True

    def _take_guess(self, request: AnyRequest) -> None:
        """Push what a request has drawn."""
        chain, answer = self._chains.get(request.session.key), request.answer
        if chain is None or not isinstance(answer, Proposal) or not answer.token_ids:
            return
        if answer.base_length == chain.length:
            link_id = request.session.link_id
            outcome = Outcome(chain.length, list(answer.token_ids))
            chain.outcomes[outcome.key] = outcome
            pushes = _pushes([(answer.session, outcome)], chain.channel)
            self._outputs.put_messages([(link_id, EventBatch((), batched=(pushes,)))])  # type: ignore[arg-type]

    def _step(self, link_id: int, due: Sequence[_Chain], now_ns: int) -> DecodeBatch | None:
        kept = np.array([chain.kept for chain in due], dtype=np.int64)
        counts = np.array([len(chain.brought) for chain in due], dtype=np.int64)
        lengths = np.array([chain.num_drawn for chain in due], dtype=np.int64)
        tokens = np.array([token_id for chain in due for token_id in chain.brought], dtype=U4)
        own = self._last.of([chain.session for chain in due])
        batched = extend_batch(own.sessions, kept, counts.astype(U4), tokens, lengths, channel=due[0].channel)
        step = DecodeBatch(link_id, batched, own, kept, kept + counts, lengths, now_ns, is_asked=False)
        step.branches = self._branches(due)
        if step.branches and not self._executor.takes_batch(step):
            self._drop_branches(due)
            step.branches = []
        self._rows = [(due[each.place], each) for each in step.branches]
        self._rows += [(chain, None) for chain in due]
        return step if step.branches or self._executor.takes_batch(step) else None

    def _branches(self, due: Sequence[_Chain]) -> list[Branch]:
        """The likeliest outcomes of all sessions that are due, as many as a loop has rows for."""
        choices = [(choice, place) for place, chain in enumerate(due) for choice in chain.choices]
        found: list[Branch] = []
        for choice, place in heapq.nlargest(self._executor.num_branch_rows - len(due), choices):
            sequence = self._executor.branch(due[place].session, choice.length)
            if sequence is None:
                break
            due[place].branches.append(sequence)
            found.append(Branch(place, choice.length, choice.token_id, sequence))
        return found

    def finish(self, step: DecodeBatch, drawn: Sequence[Drawn]) -> Messages:
        """Push what a loop has drawn."""
        self.running = None
        found: list[tuple[int, Outcome]] = []
        for (chain, branch), row in zip(self._rows, drawn, strict=False):
            if self._chains.get(chain.session.key) is chain:
                guess = [] if branch is None else [branch.token_id]
                length = chain.length if branch is None else branch.length
                sequence = None if branch is None else branch.sequence
                outcome = Outcome(length, guess + row.token_ids, row.runners_up, sequence)
                chain.outcomes[outcome.key] = outcome
                found.append((chain.session.open.session, outcome))
        self._rows = []
        pushes = _pushes(found, step.batched.channel)
        return [(step.link_id, EventBatch((), batched=(pushes,)))] if len(pushes.sessions) else []  # type: ignore[arg-type]

    def forget(self, key: SessionKey) -> None:
        """A session is asked for something, or ends."""
        if (chain := self._chains.pop(key, None)) is not None:
            self._take_noted(key, chain)
            self._drop_branches([chain])

    def _take_noted(self, key: SessionKey, chain: _Chain) -> None:
        """Give a session the branch that a noted verdict names: a coordinator counts on its text."""
        for link_id, verdicts in self._verdicts:
            for number, _, base, accepted, _, following in _rows(verdicts):
                if (link_id, number) == key and base == chain.base:
                    found = chain.outcomes.get((base + accepted, following))
                    if found is not None and found.branch in chain.branches:
                        chain.branches.remove(found.branch)
                        self._executor.take_branch(chain.session, found.branch)

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        for key in [key for key in self._chains if key[0] == link_id]:
            self.forget(key)


def _pushes(outcomes: Sequence[tuple[int, Outcome]], channel: int) -> Pushes:
    """Outcomes of sessions."""
    told = [(number, outcome.length, outcome.token_ids) for number, outcome in outcomes]
    return Pushes(
        np.array([number for number, _, _ in told], dtype=U8),
        np.array([length for _, length, _ in told], dtype=np.int64),
        np.array([len(token_ids) for _, _, token_ids in told], dtype=U4),
        np.array([token_id for _, _, token_ids in told for token_id in token_ids], dtype=U4),
        channel,
    )


def _rows(verdicts: Verdicts) -> Iterator[tuple[int, ...]]:
    return zip(*[getattr(verdicts, name).tolist() for name in Verdicts.__slots__], strict=True)
