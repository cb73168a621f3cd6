"""Drafts ahead: draft loops that follow from a target's verdicts alone, and push what they draw.

A session's chain begins with proposals that were sent to a target directly. The draft goes on from them as if all were
accepted; what it draws first is its guess of the target's next token. Each verdict makes one loop due: from the pushed
tokens where the guess was right, else from the text that the verdict names. All sessions that are due share a loop. A
verdict on another text ends the session's chain; so does any command for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch
from outrider.errors import OutriderError
from outrider.ports import EventBatch, Extend, Proposal
from outrider.prefix_hash import PrefixHash, rest_after
from outrider.proposal_channel.pushes import ChainStart, Pushes, text_hash
from outrider.proposal_channel.verdicts import Verdicts
from outrider.serving.decode.sessions import LastSessions
from outrider.serving.decode.step import DecodeBatch, extend_batch
from outrider.serving.executor import Executor
from outrider.serving.output_processor import Messages, OutputProcessor
from outrider.serving.request import AnyRequest
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats

_MAX_NEW_TOKENS = 2
"""Tokens that one loop takes in of a session."""


@dataclass(slots=True)
class _Chain:
    """One session's chain."""

    session: Session[Any]
    channel: int
    base: int
    """Length of the text whose next tokens the target computes now."""
    draft_length: int
    pushed: tuple[int, list[int]] = (-1, [])
    """Length of the text before the guess, and the tokens that were pushed after it."""
    new_tokens: list[int] = field(default_factory=list)
    """Tokens that the next loop takes in; empty: none is due."""
    kept: int = 0
    """Tokens that it keeps before them."""
    text: int = 0
    """``text_hash`` of the text after which the loop that was begun last draws, and of the step under way."""

    def note_text(self, kept: PrefixHash) -> None:
        """The loop that is due begins; ``kept`` is the hash of the tokens that it keeps."""
        self.text = text_hash(rest_after(kept[1], self.kept, self.new_tokens), self.base)

    def follow(self, base: int, accepted: int, last: int, following: int) -> bool:
        """Make the loop due that follows from a verdict; False where the chain ends."""
        if base != self.base:
            return False
        text = base + accepted
        at, tokens = self.pushed
        self.base = text + 1
        if not self.new_tokens and at == text and tokens[:1] == [following]:
            self.kept, self.new_tokens = text + len(tokens) - 1, tokens[-1:]
            return True
        held = self.session.sequence.length
        if self.new_tokens:  # the loop before has not begun: what is held past ``kept`` may be another text
            held, last = self.kept, self.new_tokens[-1]
        self.kept = min(text, held)
        self.new_tokens = [last, following][-1 - (text - self.kept) :]
        return text - self.kept < _MAX_NEW_TOKENS


class DraftsAhead:
    """The chains of one core."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
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

    @property
    def is_due(self) -> bool:
        """True if a loop may be begun."""
        return bool(self._verdicts) or any(chain.new_tokens for chain in self._chains.values())

    def start(self, link_id: int, start: ChainStart) -> Iterator[SessionKey]:
        """Begin chains; the sessions. A draft that reads states cannot go on without the target's."""
        if self._executor.reads_states:
            return
        for number, generation, base, accepted, last, _ in _rows(start.verdicts):
            session = self._sessions.get(link_id, number)
            if session is None or generation != session.generation + 1 or not self._executor.follows_verdicts(session):
                continue
            if session.sequence.length == base + accepted - 1:
                chain = _Chain(session, start.channel, base, accepted)
                chain.kept, chain.new_tokens = base + accepted - 1, [last]
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
                hit = chain.pushed[1][:1] == [verdict[3]] and chain.pushed[0] == verdict[0] + verdict[1]
                self._stats.num_lookahead_used += hit
                self._stats.num_lookahead_unused += not hit
                if not chain.follow(*verdict):
                    del self._chains[link_id, number]

    def next_step(self, now_ns: int) -> DecodeBatch | None:
        """The loop of all sessions of one channel that are due, the one served longest ago; None where there is none.
        Sessions whose tokens are not drawn in loops get requests.
        """
        self._follow(now_ns)
        for chain in [chain for chain in self._chains.values() if chain.new_tokens]:
            if not self._executor.is_decoding(chain.session):
                self._request(chain)
        due = [
            chain for chain in self._chains.values() if chain.new_tokens and self._executor.is_decoding(chain.session)
        ]
        if not due:
            return None
        link_id = due[0].session.link_id
        due = [chain for chain in due if chain.session.link_id == link_id and chain.channel == due[0].channel]
        step = self._step(link_id, due, now_ns)
        for chain in due:
            chain.new_tokens = []
            del self._chains[chain.session.key]
            if step is not None:  # the last of all now
                self._chains[chain.session.key] = chain
        self.running = step
        return step

    def _request(self, chain: _Chain) -> None:
        session, kept, new_tokens = chain.session, chain.kept, tuple(chain.new_tokens)
        if self._scheduler.queue.due_of(session.key) is not None:
            return  # the loop before has not ended
        prefix_hash = self._sessions.prefix_hash(session, kept)
        chain.note_text(prefix_hash)
        chain.new_tokens = []
        item = Extend(session.open.session, session.generation, kept, prefix_hash, new_tokens, chain.draft_length + 1)
        if self._sessions.rewind(session, kept, prefix_hash) is not None or self._is_invalid(session, item):
            del self._chains[session.key]
            return
        self._scheduler.lookahead.begin(session, item, is_guess=True)

    def _is_invalid(self, session: Session[Any], item: Extend) -> bool:
        try:
            return self._executor.check(session, item) is not None
        except OutriderError:
            return True

    def _take_guess(self, request: AnyRequest) -> None:
        """Push what a request has drawn; one that drew nothing ends its chain, which does not hold its text."""
        chain, answer = self._chains.get(request.session.key), request.answer
        if chain is None:
            return
        if not isinstance(answer, Proposal) or not answer.token_ids:
            self.drop(request.session.key)
            return
        chain.pushed = answer.base_length, list(answer.token_ids)
        pushes = Pushes(
            np.array([answer.session], dtype=U8),
            np.array([answer.base_length], dtype=np.int64),
            np.array([chain.text], dtype=U8),
            np.array([len(answer.token_ids)], dtype=U4),
            np.array(answer.token_ids, dtype=U4),
            chain.channel,
        )
        pushed = EventBatch[Any]((), batched=(pushes,))  # type: ignore[arg-type]
        self._outputs.put_messages([(request.session.link_id, pushed)])

    def _step(self, link_id: int, due: Sequence[_Chain], now_ns: int) -> DecodeBatch | None:
        kept = np.array([chain.kept for chain in due], dtype=np.int64)
        counts = np.array([len(chain.new_tokens) for chain in due], dtype=np.int64)
        lengths = np.array([chain.draft_length + 1 for chain in due], dtype=np.int64)
        tokens = np.array([token_id for chain in due for token_id in chain.new_tokens], dtype=U4)
        own = self._last.of([chain.session for chain in due])
        for chain in due:
            chain.note_text(self._sessions.prefix_hash(chain.session, chain.kept))
        batched = extend_batch(own.sessions, kept, counts.astype(U4), tokens, lengths, channel=due[0].channel)
        step = DecodeBatch(link_id, batched, own, kept, kept + counts, lengths, now_ns, is_asked=False)
        return step if self._executor.takes_batch(step) else None

    def finish(self, step: DecodeBatch, answers: AnswerBatch[Any]) -> Messages:
        """Push what a loop has drawn."""
        self.running = None
        chains = [self._chains.get((step.link_id, number)) for number in answers.sessions.tolist()]
        texts = np.array([0 if chain is None else chain.text for chain in chains], dtype=U8)
        drawn = answers.counts, answers.token_ids
        pushes = Pushes(answers.sessions, answers.base_lengths, texts, *drawn, step.batched.channel)
        for chain, (_, base, _, token_ids) in zip(chains, pushes.rows(), strict=True):
            if chain is not None:
                chain.pushed = base, token_ids
        return [(step.link_id, EventBatch((), batched=(pushes,)))]  # type: ignore[arg-type]

    def drop(self, key: SessionKey) -> None:
        """A session is asked for something, or ends."""
        self._chains.pop(key, None)

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        self._chains = {key: chain for key, chain in self._chains.items() if key[0] != link_id}


def _rows(verdicts: Verdicts) -> Iterator[tuple[int, ...]]:
    return zip(*[getattr(verdicts, name).tolist() for name in Verdicts.__slots__], strict=True)
