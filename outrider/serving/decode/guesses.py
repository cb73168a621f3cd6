"""Guessed steps: proposals under rejection that a draft begins before the verdict on the one before them.

A coordinator draws the coins there, so the verdict is not known before. The draft goes on as if all of its proposal
were accepted. It guesses the bonus token by the noise with which the target draws it, and draws from there what an
``Extend`` after that token would ask for, from the same random numbers. The next ``Extend`` claims it if it names that
token, and is served as if nothing had been begun otherwise. Sessions of one message claim together or not at all: those
that go on at once would leave the batch of the others, and each batch would wait for the other's forward.

The guess is compared and never emitted, and no coin and no draw of a proposal reads its noise, so the law is that of
drafting in turn: the tokens are even the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.batched import U4, AnswerBatch
from outrider.proposal_channel.verdicts import Verdicts
from outrider.recording import ForwardRecord
from outrider.serving.decode.begun import BegunSteps
from outrider.serving.decode.sessions import LastSessions
from outrider.serving.decode.step import DecodeBatch, extend_batch
from outrider.serving.executor import Executor
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry

MAX_GUESSED_SESSIONS = 2
"""Most sessions whose proposals a draft goes on from: all guesses have to be right, and a third of one's are."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """One session's proposal, which a target scores."""

    session: Session[Any]
    generation: int
    length: int
    """Tokens of the text with the proposal."""
    draft_length: int
    last: int
    """The last draft token, which the draft has no KV of."""
    channel: int
    base: int
    """Tokens of the text before the proposal."""


class Guesses:
    """Guessed steps of one core."""

    def __init__(
        self, sessions: SessionRegistry[Any], executor: Executor[Any, Any, Any, Any], begun: BegunSteps
    ) -> None:
        """``begun`` holds the proposals until they are claimed."""
        self._sessions, self._executor, self._begun = sessions, executor, begun
        self._due: dict[SessionKey, _Sent] = {}
        self._last = LastSessions(executor.session_rows)
        self.running: DecodeBatch | None = None

    @property
    def is_due(self) -> bool:
        """True if a step may be begun."""
        return bool(self._due)

    def start(self, link_id: int, accepted: Verdicts, channel: int, wanted: dict[SessionKey, int]) -> None:
        """Note proposals that were sent to a target, as verdicts that accept them, if they are of all sessions: others
        would wait for the loop. ``wanted``: draft tokens that were asked for where fewer had been begun.
        """
        if not len(self._sessions) == len(accepted) <= MAX_GUESSED_SESSIONS:
            return
        fields = [getattr(accepted, name).tolist() for name in Verdicts.__slots__]
        for number, generation, base, count, last, _ in zip(*fields, strict=True):
            session = self._sessions.get(link_id, number)
            if session is None or generation != session.generation + 1 or not self._executor.may_guess(session):
                continue
            if session.sequence.length == base + count - 1:
                length = wanted.pop(session.key, count)
                self._due[session.key] = _Sent(session, session.generation, base + count, length, last, channel, base)

    def next_step(self, now_ns: int) -> DecodeBatch | None:
        """The loop of all that is due, which is of one message; None where it cannot be begun. Nothing is due then."""
        due = [sent for sent in self._due.values() if sent.session.generation == sent.generation]
        self._due = {}
        self.running = self._step(due, now_ns) if due else None
        return self.running

    def _step(self, due: Sequence[_Sent], now_ns: int) -> DecodeBatch | None:
        texts = np.array([sent.length for sent in due], dtype=np.int64)
        lengths = np.array([sent.draft_length + 1 for sent in due], dtype=np.int64)
        tokens = np.array([sent.last for sent in due], dtype=U4)
        own = self._last.of([sent.session for sent in due])
        counts = np.ones(len(due), dtype=U4)
        batched = extend_batch(own.sessions, texts - 1, counts, tokens, lengths, channel=due[0].channel)
        step = DecodeBatch(due[0].session.link_id, batched, own, texts - 1, texts, lengths, now_ns, is_asked=False)
        step.guessed_from = np.array([sent.base for sent in due], dtype=np.int64)
        return step if self._executor.takes_batch(step) else None

    def finish(self, step: DecodeBatch, answers: AnswerBatch[Any], forward: ForwardRecord) -> None:
        """Hold what a loop has drawn after its guesses."""
        self.running = None
        indices = np.flatnonzero((answers.counts > 1) & [self._sessions.holds(session) for session in step.sessions])
        if not indices.size:
            return
        drawn = answers.selected(indices)
        firsts = drawn.counts.cumsum(dtype=np.int64) - drawn.counts
        own, kept = step.own.selected(indices), step.kept[indices]
        tokens = np.stack([step.batched.token_ids[indices], drawn.token_ids[firsts].astype(U4)], axis=1)
        lengths = step.draft_lengths[indices] - 1
        counts = np.full(len(indices), tokens.shape[1], dtype=U4)
        hashes = list(map(self._sessions.prefix_hash, own.sessions, kept.tolist()))
        batched = extend_batch(own.sessions, kept, counts, tokens.flatten(), lengths, hashes=hashes)
        begun = replace(step, batched=batched, own=own, kept=kept, bases=kept + 2, draft_lengths=lengths)
        self._begun.hold(begun, _without(drawn, firsts), forward)

    def drop(self, key: SessionKey) -> None:
        """A session is asked for something, or ends."""
        self._due.pop(key, None)

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        self._due = {key: sent for key, sent in self._due.items() if key[0] != link_id}


def _without(drawn: AnswerBatch[Any], firsts: Any) -> AnswerBatch[Any]:  # noqa: ANN401 - [B]
    """Proposals without the guesses, which have no support, and after them."""
    supports = drawn.supports
    return replace(
        drawn,
        base_lengths=drawn.base_lengths + U4.type(1),
        counts=drawn.counts - U4.type(1),
        token_ids=np.delete(drawn.token_ids, firsts),
        supports=None if supports is None else replace(supports, counts=np.delete(supports.counts, firsts)),
    )
