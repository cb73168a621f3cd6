"""Waiting sessions: which arrays are a step of theirs, by generation and by the text that these keep; a step's keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import ExtendBatch
from outrider.ports import Open
from outrider.prefix_hash import BLOCK_TOKENS, PrefixHash, PrefixHasher
from outrider.serving.decode.sessions import RunningSessions
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.decode.waiting import WaitingSessions
from outrider.serving.session import Session
from outrider.types import JudgingRule, SamplingParams

BASE, NUM_DRAFTS, ANSWERED = BLOCK_TOKENS + 9, 4, 7


@dataclass
class Text:
    token_ids: list[int]

    @property
    def length(self) -> int:
        return len(self.token_ids)


class Table:
    """The hashes of sessions' texts."""

    def prefix_hash(self, session: Session[Any], length: int) -> PrefixHash:
        return PrefixHasher().at(session.sequence.token_ids, length)

    def hash_ahead(self, session: Session[Any], base: int) -> tuple[bytes, list[int]]:
        return PrefixHasher().tails(session.sequence.token_ids, base, session.sequence.length)


def session(number: int) -> Session[Any]:
    opening = Open(
        number, 0, SamplingParams(), 1, JudgingRule.GREEDY, prompt_length=4, max_length=900, num_token_ids=99
    )
    return Session(0, opening, Text([(number * place) % 99 for place in range(BASE + NUM_DRAFTS)]), 900, ANSWERED, BASE)


SESSIONS = [session(number) for number in (3, 5)]


def waiting() -> WaitingSessions:
    table: Any = Table()
    return WaitingSessions(table, RunningSessions.of(SESSIONS, None), [BASE, BASE])


def asking(*, generation: int = ANSWERED + 1, kept: int = BASE + 2, hashed: int | None = None) -> ExtendBatch:
    """The second session asks for this; the first one is in order."""
    texts = (BASE + 1, BASE + 1), (kept, kept if hashed is None else hashed)
    hashes = [Table().prefix_hash(one, length) for one, (_, length) in zip(SESSIONS, texts, strict=True)]
    return ExtendBatch(
        np.array([3, 5], dtype="<u8"),
        np.array([ANSWERED + 1, generation], dtype="<u8"),
        np.array([kept for kept, _ in texts], dtype="<u4"),
        b"".join([chain for chain, _ in hashes]),
        np.array([rest for _, rest in hashes], dtype="<u8"),
        np.ones(2, dtype="<u4"),
        np.array([7, 8], dtype="<u4"),
        np.array([4, 4], dtype="<u4"),
    )


@pytest.mark.parametrize("kept", range(BASE, BASE + NUM_DRAFTS + 1))
def test_columns_that_keep_the_committed_text_and_drafts_after_it_are_a_step(kept: int) -> None:
    step = waiting().find(0, asking(kept=kept), 5)
    assert step is not None
    assert (step.kept.tolist(), step.bases.tolist()) == ([BASE + 1, kept], [BASE + 2, kept + 1])


@pytest.mark.parametrize(
    "batched",
    [
        pytest.param(asking(generation=ANSWERED), id="of the generation that was answered"),
        pytest.param(asking(generation=ANSWERED - 1), id="of an older generation"),
        pytest.param(asking(kept=BASE - 1), id="less than was committed"),
        pytest.param(asking(kept=BASE + 2, hashed=BASE + 1), id="another running hash"),
        pytest.param(asking(kept=BASE + 2, hashed=BASE - BLOCK_TOKENS), id="another chain"),
    ],
)
def test_other_columns_are_none(batched: ExtendBatch) -> None:
    assert waiting().find(0, batched, 5) is None


def test_another_chain_of_the_same_running_hash_is_another_text() -> None:
    batched = asking()
    assert waiting().find(0, replace(batched, chains=bytes(len(batched.chains))), 5) is None


class CountingSession:
    """A session that counts how often its key is read."""

    def __init__(self, number: int) -> None:
        self._number, self.num_reads = number, 0

    @property
    def key(self) -> tuple[int, int]:
        self.num_reads += 1
        return 0, self._number


def test_keys_are_made_once_however_many_commands_look_for_theirs() -> None:
    sessions, ints = [CountingSession(number) for number in (3, 1, 2)], np.zeros(3, dtype=np.int64)
    columns: Any = None
    own = RunningSessions(sessions, None, np.zeros(3))  # type: ignore[arg-type]
    step = DecodeBatch(0, columns, own, ints, ints, ints, 0)
    assert [(0, number) in step.keys for number in (1, 4)] == [True, False]
    assert list(step.keys) == [(0, 3), (0, 1), (0, 2)]
    assert [session.num_reads for session in sessions] == [1, 1, 1]
