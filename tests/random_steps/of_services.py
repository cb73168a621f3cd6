"""Draft and target cores under random commands: rounds, rollbacks, cancellations, releases, lost links.

Owns the commands and what must hold of each answer: it is of the newest generation, it continues the base that was
named, and a greedy target says what it says of the same text alone. Pages must add up after every step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Prepare, Proposal, Refused, Release, Scores, SessionLost
from outrider.sampling.sampler import Sampler
from outrider.types import AcceptanceMethod, SamplingParams, ScoreForm, SparseEvidence, Support, TokenScores
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from outrider_target.executor import next_token
from tests.support.async_target import AsyncTargetExecutor, lookahead_core
from tests.support.core_driver import Driver, extend_item, open_session, score_item

MOST_SESSIONS = 8
MAX_LENGTH = 96
SAMPLINGS = (
    (SamplingParams(temperature=0.0), AcceptanceMethod.REJECTION),
    (SamplingParams(temperature=0.8), AcceptanceMethod.REJECTION),
    (SamplingParams(temperature=1.0, top_p=0.9), AcceptanceMethod.REJECTION),
    (SamplingParams(temperature=1.0), AcceptanceMethod.COUPLED),
    (SamplingParams(temperature=0.9), AcceptanceMethod.TYPICAL),
)


@dataclass
class _Session:
    number: int
    sampling: SamplingParams
    method: AcceptanceMethod
    tokens: list[int]
    """Committed."""
    held: int = 0
    """Tokens of those that the service was last told to keep."""
    asked: int = 0
    """The newest item's generation."""
    drafted: Proposal | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class _Side:
    """One core, its sessions, and what is common to both roles."""

    def __init__(self, runner: ModelRunner, core: Any, seed: int, num_token_ids: int) -> None:
        self.runner, self.driver = runner, Driver(core)
        self.num_answers = self.num_checks = 0
        self._random = random.Random(seed)
        self._num_token_ids = num_token_ids
        self._sessions: dict[int, _Session] = {}
        self._generation = self._next_number = 0
        self._beginnings = [self._new_tokens(40) for _ in range(3)]

    @property
    def num_foreseen(self) -> tuple[int, int] | None:
        """Items that were computed before they came: used, unused; None where none is."""
        return None

    def run(self, num_steps: int) -> None:
        """Random steps; in the end the link is dropped and every page is free."""
        for _ in range(num_steps):
            self._command()
            if self._random.random() < 0.8:
                for event in self.driver.step():
                    self._take(event)
            self.runner.sequences.check_integrity()
        self.driver.core.drop_link(self.driver.link_id)
        self.runner.sequences.check_integrity()
        cache = self.runner.sequences.prefix_cache
        assert cache is not None
        assert cache.num_hit_tokens
        assert self.runner.sequences.pool.num_used == 0

    def _command(self) -> None:
        chance = self._random.random()
        if chance < 0.15 and len(self._sessions) < MOST_SESSIONS:
            self._open()
        elif chance < 0.2 and self._sessions:
            self._release(self._random.choice(list(self._sessions.values())))
        elif chance < 0.202:
            self.driver.core.drop_link(self.driver.link_id)
            self._sessions.clear()
            self.driver.link_id += 1
        elif self._sessions:
            self._ask(self._random.choice(list(self._sessions.values())))

    def _open(self) -> None:
        sampling, method = self._random.choice(SAMPLINGS)
        prompt = self._new_prompt()
        session = _Session(self._next_number, sampling, method, prompt)
        self._next_number += 1
        self._sessions[session.number] = session
        opening = open_session(
            session.number,
            prompt_length=len(prompt),
            max_length=MAX_LENGTH,
            num_token_ids=self._num_token_ids,
            generation=self._new_generation(),
            sampling=sampling,
            seed=self._random.getrandbits(60),
            acceptance_method=method,
        )
        self.driver.send(opening)

    def _release(self, session: _Session) -> None:
        del self._sessions[session.number]
        self.driver.send(Release(session.number, self._new_generation()))

    def _ask(self, session: _Session) -> None:
        raise NotImplementedError

    def _check(self, session: _Session, event: Any) -> None:
        raise NotImplementedError

    def _take(self, event: Any) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        if isinstance(event, Refused):
            del self._sessions[event.session]
        elif isinstance(event, SessionLost):
            raise AssertionError(f"nothing was lost: {event}")
        elif event.generation == session.asked:
            assert event.base_length == len(session.tokens), event
            self.num_answers += 1
            session.asked = 0
            self._check(session, event)
            if len(session.tokens) > MAX_LENGTH - 10:
                self._release(session)

    def _cut(self, session: _Session) -> None:
        """Sometimes the text goes back a little: a rollback of what was committed, as after a rebuild elsewhere."""
        if session.asked == 0 and self._random.random() < 0.2 and len(session.tokens) > 2:
            del session.tokens[self._random.randint(2, len(session.tokens)) :]
            session.drafted = None
            session.held = min(session.held, self._random.randint(0, len(session.tokens) - 1))

    def _new_prompt(self) -> list[int]:
        """Some begin as others did, so that they are cached."""
        beginning = self._random.choice(self._beginnings) if self._random.random() < 0.5 else []
        return [*beginning, *self._new_tokens(self._random.choice((1, 3, 20, 60)))][:70]

    def _new_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._num_token_ids) for _ in range(count)]

    def _new_generation(self) -> int:
        self._generation += 1
        return self._generation


class TargetSteps(_Side):
    """Scores of random drafts, and for a while of none: then the core computes ahead what is mostly asked for next."""

    def __init__(self, runner: ModelRunner, seed: int, *, num_token_ids: int) -> None:
        core = lookahead_core(AsyncTargetExecutor(runner), max_batched_tokens=48, max_mixed_prefill_tokens=24)
        super().__init__(runner, core, seed, num_token_ids)
        self._num_plain = 0
        """Items to come without drafts."""

    @property
    def num_foreseen(self) -> tuple[int, int] | None:
        """Items that were computed before they came: used, unused."""
        activity = self.driver.core.stats
        return activity.num_lookahead_used, activity.num_lookahead_unused

    def _ask(self, session: _Session) -> None:
        if session.asked and self._random.random() < 0.7:
            return  # the rest asks again before the answer: the first item is cancelled
        self._cut(session)
        drafts = self._new_tokens(min(self._num_drafts(), MAX_LENGTH - len(session.tokens)))
        session.extra["drafts"] = drafts
        session.asked = self._new_generation()
        support = None
        if session.method is AcceptanceMethod.REJECTION and session.sampling.temperature > 0 and drafts:
            support = self._support(drafts)
        # What of an earlier item's tokens was computed is not known: keep what both sides surely share.
        base = min(session.held, len(session.tokens) - 1)
        item = score_item(session.number, session.asked, session.tokens, drafts, num_kept_tokens=base, support=support)
        credit = [Prepare(session.number, session.asked, self._random.randint(0, 8))]
        self.driver.send(item, *([] if drafts or self._random.random() < 0.3 else credit))
        session.held = base

    def _num_drafts(self) -> int:
        self._num_plain -= 1
        if self._num_plain < -40:
            self._num_plain = 120
        return 0 if self._num_plain > 0 else self._random.randint(0, 6)

    def _next_token(self, form: ScoreForm) -> int:
        """Tokens that a coordinator would go on with, mostly."""
        token_id = next_token(form) if self._random.random() < 0.9 else None
        return self._new_tokens(1)[0] if token_id is None else token_id

    def _support(self, drafts: list[int]) -> Support:
        import numpy as np

        rows = [sorted({token, *self._new_tokens(self._random.randint(0, 5))}) for token in drafts]
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        return Support(counts, np.array([token for row in rows for token in row], dtype=np.int32))

    def _check(self, session: _Session, event: Any) -> None:
        assert isinstance(event, Scores), event
        drafts = session.extra["drafts"]
        base = len(session.tokens)
        accepted = self._random.randint(0, len(drafts))
        if isinstance(event.form, TokenScores):
            assert len(event.form.token_ids) == len(drafts) + 1
            if session.sampling.temperature == 0 and self._random.random() < 0.5:
                self._check_greedy([*session.tokens, *drafts], base, event.form.token_ids)
        session.held = base + accepted
        session.tokens += [*drafts[:accepted], self._next_token(event.form)]

    def _check_greedy(self, text: list[int], base: int, said: tuple[int, ...]) -> None:
        pool = self.runner.sequences.pool
        if pool.num_free < pool.pages_for(len(text)):
            return
        sequence = self.runner.sequences.open(len(text))
        logits = self.runner.forward([ForwardRow(sequence, text, len(said))])[:, : self._num_token_ids]
        self.runner.sequences.release(sequence)
        best = logits.max(-1).values
        for position, token in enumerate(said):
            gap = float(best[position] - logits[position, token])
            assert gap <= 1e-3 * float(best[position].abs() + 1), f"{gap} at {base + position}"
        self.num_checks += 1


class DraftSteps(_Side):
    """Proposals, some of which come true."""

    def __init__(self, runner: ModelRunner, seed: int, *, num_token_ids: int) -> None:
        runner.sampler = Sampler(DraftingRules(support_limit=64))
        core = build_model_core(ModelProposer(runner), max_batched_tokens=48, max_mixed_prefill_tokens=24)
        super().__init__(runner, core, seed, num_token_ids)

    def _ask(self, session: _Session) -> None:
        if session.asked and self._random.random() < 0.7:
            return
        self._cut(session)
        session.extra["wanted"] = self._random.choice((0, 1, 2, 4, 4, 4, 7))
        session.asked = self._new_generation()
        base = min(session.held, len(session.tokens))
        wanted = session.extra["wanted"]
        self.driver.send(extend_item(session.number, session.asked, session.tokens, wanted, num_kept_tokens=base))
        session.held = base

    def _check(self, session: _Session, event: Any) -> None:
        assert isinstance(event, Proposal), event
        assert len(event.token_ids) <= session.extra["wanted"]
        assert all(0 <= token < self._num_token_ids for token in event.token_ids)
        if isinstance(event.evidence, SparseEvidence):
            ends = event.evidence.counts.cumsum()
            assert len(ends) == len(event.token_ids)
            for token, end, count in zip(event.token_ids, ends, event.evidence.counts, strict=True):
                ids = event.evidence.token_ids[end - count : end].tolist()
                assert token in ids
                assert len(set(ids)) == len(ids)
                assert abs(float(event.evidence.probs[end - count : end].sum()) - 1) < 1e-3
            self.num_checks += 1
        accepted = self._random.randint(0, len(event.token_ids))
        # The service holds no KV of the last token it drew.
        session.held = len(session.tokens) + min(accepted, max(0, len(event.token_ids) - 1))
        session.tokens += [*event.token_ids[:accepted], *self._new_tokens(1)]
        del session.tokens[MAX_LENGTH:]
