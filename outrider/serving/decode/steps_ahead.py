"""Steps ahead: steps with drafts that a target begins by itself, before the coordinator asks for them.

Under the greedy and coupled rules a target's own tokens say which text follows. As soon as a step has ended it begins
the next one of those sessions, with the draft tokens that were pushed for this text, or with none. The coordinator
claims the step by a ``Score`` without drafts; the answer names the draft tokens that were scored. A claim for another
text, or any other command, is served as if nothing had been begun, so a wrong step costs time and never a token.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import U1, U4, U8, AnswerBatch, CommandBatch, ScoreBatch, one_by_one
from outrider.limits import MAX_DRAFT_LENGTH
from outrider.ports import Score
from outrider.proposal_channel.pushes import Pushes, text_hash
from outrider.proposal_channel.verdicts import verdicts_on
from outrider.recording import ForwardRecord
from outrider.serving.decode.sessions import LastSessions
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import Executor
from outrider.serving.output_processor import Messages, OutputProcessor
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats

PATIENCE_NS = 1_500_000
"""Longest wait for a push: a step without drafts brings a third of the tokens of one with."""


@dataclass(slots=True)
class NextStep:
    """The step of one session that follows from its last scores."""

    session: Session[Any]
    base: int
    """Length of the text on which those scores build."""
    num_kept_tokens: int
    token_id: int
    channel: int
    until_ns: int
    """Deadline of the wait for its draft's push."""
    is_claimed: bool = False
    trace_parent: str = ""
    """Trace parent of its claim."""
    held: tuple[DecodeBatch, AnswerBatch[Any], ForwardRecord, int] | None = None
    """Answers that nothing had claimed when they were there, and the place of this session's."""


class StepsAhead:
    """The steps of one core that are begun by themselves."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        scheduler: Scheduler,
        outputs: OutputProcessor,
        *,
        stats: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._sessions, self._executor, self._scheduler = sessions, executor, scheduler
        self._outputs, self._stats = outputs, stats
        self._due: dict[SessionKey, NextStep] = {}
        self._running: dict[SessionKey, NextStep] = {}
        self._held: dict[SessionKey, NextStep] = {}
        self._pushed: dict[SessionKey, tuple[int, int, list[int]]] = {}
        """Length and hash of the text before the guess, and the tokens, of what was pushed last."""
        self._silent: set[SessionKey] = set()
        """Sessions whose drafts were waited for in vain."""
        self._last = LastSessions(executor.session_rows)

    @property
    def is_due(self) -> bool:
        """True if a step is to be begun."""
        return bool(self._due)

    def are_due(self, keys: KeysView[SessionKey]) -> bool:
        """True if the next step is of all these sessions."""
        return keys <= self._due.keys()

    @property
    def has_any(self) -> bool:
        """True if a command may be a claim."""
        return bool(self._due or self._running or self._held)

    def push(self, link_id: int, pushes: Pushes) -> None:
        """Keep what a draft has pushed, in place of what it had before."""
        for number, base, hashed, token_ids in pushes.rows():
            if token_ids and self._sessions.get(link_id, number) is not None:
                self._pushed[link_id, number] = base, hashed, token_ids
                self._silent.discard((link_id, number))

    def drop_pushes(self, step: DecodeBatch) -> None:
        """A step was asked for with its drafts' proposals: what was pushed before these is of no use any more."""
        for key, base in zip(step.keys, step.bases.tolist(), strict=True):
            if (pushed := self._pushed.get(key)) is not None and pushed[0] <= base:
                del self._pushed[key]

    def go_on(self, link_id: int, answers: AnswerBatch[Any], channel: int) -> AnswerBatch[Any]:
        """Have the steps due that follow from scores that leave, which say so then."""
        verdicts = verdicts_on(answers)
        if verdicts is None:
            return answers
        until_ns = self._clock() + PATIENCE_NS
        ends = answers.counts.cumsum(dtype=np.int64)
        ids, starts = answers.token_ids.tolist(), (ends - answers.counts).tolist()
        heads = verdicts.sessions.tolist(), verdicts.base_lengths.tolist(), verdicts.num_accepted.tolist()
        goes_on = np.zeros(len(answers.sessions), dtype=U1)
        for place, (number, base, accepted, start) in enumerate(zip(*heads, starts, strict=True)):
            session = self._sessions.get(link_id, number)
            new = ids[start : start + accepted + 1]
            if session is None or not set(session.open.eos_token_ids).isdisjoint(new):
                continue
            # The state of a grammar is not known yet after these tokens.
            if session.open.sampling.grammar is not None or session.open.in_turn:
                continue
            if base + accepted + 2 < session.open.max_length:
                self._due[session.key] = NextStep(session, base, base + accepted, new[-1], channel, until_ns)
                goes_on[place] = 1
        return replace(answers, goes_on=goes_on)

    def pause_ns(self) -> int:
        """Nanoseconds that the next step may still wait for pushes; 0: it begins now."""
        awaited = [each.until_ns for key, each in self._due.items() if key not in self._silent and self._is_late(each)]
        return max(0, max(awaited) - self._clock()) if awaited else 0

    def _is_late(self, step: NextStep) -> bool:
        """True if nothing was pushed for a step, or only for an earlier one: its own push is on its way."""
        pushed = self._pushed.get(step.session.key)
        return pushed is None or pushed[0] < step.num_kept_tokens

    def next_step(self, now_ns: int) -> DecodeBatch | None:
        """The step of all sessions of one link that are due, which are then no more; None where it cannot be begun."""
        self._due = {key: each for key, each in self._due.items() if self._sessions.holds(each.session)}
        if not self._due:
            return None
        link_id, _ = next(iter(self._due))
        own = {key: each for key, each in self._due.items() if key[0] == link_id}
        step = self._step(link_id, list(own.values()), now_ns)
        if step is not None:
            self._due = {key: each for key, each in self._due.items() if key[0] != link_id}
            self._running = own
        return step

    def _step(self, link_id: int, rows: Sequence[NextStep], now_ns: int) -> DecodeBatch | None:
        drafts = [self._drafts_for(each) for each in rows]
        kept = np.array([each.num_kept_tokens for each in rows], dtype=np.int64)
        lengths = np.array([len(each) for each in drafts], dtype=np.int64)
        batched = ScoreBatch(
            np.array([each.session.open.session for each in rows], dtype=U8),
            np.array([each.session.generation for each in rows], dtype=U8),
            kept.astype(U4),
            b"",
            np.zeros(len(rows), dtype=U8),
            np.ones(len(rows), dtype=U4),
            np.array([each.token_id for each in rows], dtype=U4),
            lengths.astype(U4),
            np.array([token_id for each in drafts for token_id in each], dtype=U4),
            channel=rows[0].channel,
            begins_next=True,
        )
        own = self._last.of([each.session for each in rows])
        step = DecodeBatch(link_id, batched, own, kept, kept + 1, lengths, now_ns, is_asked=False)
        return step if self._scheduler.takes_decode_batch(step) and self._executor.takes_batch(step) else None

    def _drafts_for(self, step: NextStep) -> list[int]:
        key = step.session.key
        if self._is_late(step):
            self._pushed.pop(key, None)
            self._silent.add(key)
            return []
        base, hashed, (guess, *drafts) = self._pushed.pop(key)
        if base != step.num_kept_tokens or guess != step.token_id:
            return []
        if hashed != text_hash(self._sessions.prefix_hash(step.session, base)[1], step.base):
            return []  # the draft went on from another text, or holds these tokens no longer
        return drafts[: max(0, min(MAX_DRAFT_LENGTH, step.session.open.max_length - base - 1))]

    def claim(self, link_id: int, commands: Sequence[Any], arrived_ns: int) -> list[Any]:
        """Take the commands that ask for what is due, runs or is held; the other ones."""
        left: list[Any] = []
        claimed: list[NextStep] = []
        for command in one_by_one(commands, stays=partial(self._has_no_claims, link_id)):
            found = self._claim((link_id, command.session), command, arrived_ns) if isinstance(command, Score) else None
            if found is None:
                left.append(command)
            else:
                claimed.append(found)
        self._outputs.put_messages(self._answer_held(claimed))
        return left

    def _has_no_claims(self, link_id: int, batched: CommandBatch) -> bool:
        if not isinstance(batched, ScoreBatch) or any(batched.draft_lengths.tolist()):
            return True
        begun = self._due.keys() | self._running.keys() | self._held.keys()
        return begun.isdisjoint([(link_id, number) for number in batched.sessions.tolist()])

    def _claim(self, key: SessionKey, item: Score, arrived_ns: int) -> NextStep | None:
        step = self._due.get(key) or self._running.get(key) or self._held.get(key)
        if step is None or step.is_claimed or not self._asks_for(item, step):
            return None
        step.is_claimed, step.trace_parent = True, item.trace_parent
        step.session.generation, step.session.used_ns = item.generation, arrived_ns
        self._scheduler.note_claimed([key], arrived_ns)
        self._stats.num_lookahead_used += 1
        return step

    def _answer_held(self, claimed: Sequence[NextStep]) -> Messages:
        """Answer the claims of steps that have ended, those of one step together."""
        held: dict[int, list[NextStep]] = {}
        for each in claimed:
            if each.held is not None:
                del self._held[each.session.key]
                held.setdefault(id(each.held[0]), []).append(each)
        messages: Messages = []
        for group in held.values():
            own = {each.held[3]: each for each in group if each.held is not None}
            indices = sorted(own)
            step, answers, forward, _ = next(each.held for each in group if each.held is not None)
            messages += self._answer(step, answers, forward, {place: own[place] for place in indices})
        return messages

    def _asks_for(self, item: Score, step: NextStep) -> bool:
        kept = step.num_kept_tokens
        return (
            item.num_kept_tokens == kept
            and item.token_ids == (step.token_id,)
            and not item.draft_token_ids
            and item.hidden_states_from is None
            and item.generation > step.session.generation
            and item.prefix_hash == self._sessions.prefix_hash(step.session, kept)
        )

    def finish(self, step: DecodeBatch, answers: AnswerBatch[Any], forward: ForwardRecord) -> Messages:
        """Answer the sessions that have claimed a step that has ended, and keep the answers of the others."""
        running, self._running = self._running, {}
        claimed: dict[int, NextStep] = {}
        for place, session in enumerate(step.sessions):
            own = running.get(session.key)
            if own is None:
                continue
            if own.is_claimed:
                claimed[place] = own
            else:
                own.held = step, answers, forward, place
                self._held[session.key] = own
        return self._answer(step, answers, forward, claimed) if claimed else []

    def _answer(
        self,
        step: DecodeBatch,
        answers: AnswerBatch[Any],
        forward: ForwardRecord,
        claimed: Mapping[int, NextStep],
    ) -> Messages:
        """``claimed``: by place in the step, in its order."""
        channel = step.batched.channel
        chosen: NDArray[np.intp] = np.array(list(claimed), dtype=np.intp)
        drafts = step.batched.draft_token_ids if isinstance(step.batched, ScoreBatch) else None
        answers = replace(answers, draft_token_ids=drafts)
        if len(claimed) < len(step):
            answers = answers.selected(chosen)
        generations = [each.session.generation for each in claimed.values()]
        answers = replace(answers, generations=np.array(generations, dtype=U8))
        batched: Any = step.batched
        batched = replace(batched, draft_token_ids=answers.draft_token_ids)
        answers = self.go_on(step.link_id, answers, channel)
        parents = [each.trace_parent for each in claimed.values()]
        return self._outputs.batch_message(replace(step, batched=batched), answers, forward, parents)

    def drop(self, key: SessionKey) -> None:
        """A session asks for something else, or ends."""
        for found in (self._due, self._running, self._held):
            if found.pop(key, None) is not None:
                self._stats.num_lookahead_unused += 1
        self._pushed.pop(key, None)
        self._silent.discard(key)

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        for found in (self._due, self._running, self._held, self._pushed):
            for key in [key for key in found if key[0] == link_id]:
                del found[key]
        self._silent = {key for key in self._silent if key[0] != link_id}

    def dissolve(self) -> list[tuple[int, Score, int]]:
        """Give up what is due or has failed; the claims of it, each with its link and the time when it came."""
        begun, self._due, self._running = self._running | self._due, {}, {}
        claims = []
        for (link_id, number), each in begun.items():
            self._stats.num_lookahead_unused += 1
            if each.is_claimed and self._sessions.holds(each.session):
                session, kept = each.session, each.num_kept_tokens
                prefix_hash = self._sessions.prefix_hash(session, kept)
                item = Score(
                    number, session.generation, kept, prefix_hash, (each.token_id,), trace_parent=each.trace_parent
                )
                claims.append((link_id, item, session.used_ns))
        return claims
