"""Rows of a ``ScoreAhead``: each is what it was, whichever others have their proposals already."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.batched import U4, U8, AnswerBatch, ScoreAhead, ScoreBatch
from outrider.item_batch import command_batch
from outrider.ports import Proposal, Score
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES

NUM_ROWS = 7


def ahead_of(items: list[Score], lengths: list[int]) -> ScoreAhead:
    batched = command_batch(items)
    assert isinstance(batched, ScoreBatch)
    generations = batched.generations + U8.type(50)
    return ScoreAhead(replace(batched, draft_lengths=np.array(lengths, dtype=U4)), 3, generations)


def proposals_of(ahead: ScoreAhead, rows: list[int], lengths: list[int]) -> AnswerBatch[Proposal]:
    counts = np.array([lengths[row] for row in rows], dtype=U4)
    sessions, generations = ahead.batched.sessions[rows], ahead.proposals[rows]
    ids = np.arange(int(counts.sum()), dtype=U4)
    return AnswerBatch(sessions, generations, counts, counts, ids, (), Proposal)


def items_of(chance: random.Random, *, reads_states: bool) -> list[Score]:
    found = []
    for row in range(NUM_ROWS):
        kept = chance.choice((1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1))
        prefix_hash = bytes([row + 1]) * (CHAIN_BYTES if kept >= BLOCK_TOKENS else 0), 1000 + row
        token_ids = tuple(range(row, row + chance.randint(1, 3)))
        states_from = kept if reads_states else None
        found.append(
            Score(90 - row, row, kept, prefix_hash, token_ids, hidden_states_from=states_from, plane=2 * reads_states)
        )
    return found


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_what_they_were(seed: int) -> None:
    chance = random.Random(seed)
    items = items_of(chance, reads_states=bool(seed % 2))
    lengths = [chance.randint(1, 4) for _ in items]
    ahead: ScoreAhead | None = ahead_of(items, lengths)
    left = list(range(NUM_ROWS))
    while ahead is not None:
        some = chance.sample(left, chance.randint(1, len(left)))
        own = [left.index(row) for row in some]
        sent = proposals_of(ahead, own, [lengths[row] for row in left])
        rows = ahead.rows_for(sent.channel_key, sent.counts)
        assert rows is not None and list(rows) == own
        chosen = ahead.selected(rows)
        assert chosen.batched.draft_lengths.tolist() == [lengths[row] for row in some]
        bare = replace(chosen.batched, draft_lengths=np.zeros(len(some), dtype=U4))
        assert list(bare.items()) == [items[row] for row in some]
        left = [row for row in left if row not in some]
        ahead = ahead.without(rows)
    assert not left


def test_a_message_is_taken_whole_or_not_at_all() -> None:
    ahead = ahead_of(items_of(random.Random(1), reads_states=False), [2] * NUM_ROWS)
    two = [2] * NUM_ROWS
    some, every = proposals_of(ahead, [1, 4], two), proposals_of(ahead, list(range(NUM_ROWS)), two)
    assert ahead.rows_for(some.channel_key, some.counts) == [1, 4]
    assert ahead.rows_for(every.channel_key, every.counts) == range(NUM_ROWS)
    for sent in (
        replace(some, counts=some.counts - U4.type(1)),
        replace(every, counts=every.counts + U4.type(1)),
        replace(some, generations=some.generations + U8.type(1)),
        proposals_of(ahead, [1, 1], two),
        replace(some, sessions=np.array([some.sessions.item(0), 12345], dtype=U8)),
    ):
        assert ahead.rows_for(sent.channel_key, sent.counts) is None
