"""Slots of recurrent states beside a naive model, in which a slot holds the tokens that its state and log are of."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.errors import InvalidRequestError, OutOfPagesError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool, RecurrentSpec, StateSlots
from outrider.kv_cache.state_slots import NUM_REWIND_TOKENS

PAGE_SIZE, INTERVAL, NUM_SLOTS, LONGEST = 4, 24, 16, 120
SPEC = RecurrentSpec(num_heads=1, key_dim=1, value_dim=1, num_inputs=1, num_taps=4, log_length=32)
MOST_DRAFTS = SPEC.num_replayed - PAGE_SIZE - NUM_REWIND_TOKENS - 4


@dataclass
class Slot:
    """Content of a slot: the tokens before its state, and those that its log has, by place."""

    state: tuple[int, ...] = (-1,)
    log: dict[int, tuple[int, int]] = field(default_factory=dict)


class Device:
    """Slots as forwards use them."""

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(NUM_SLOTS)]

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        read = [(place, self.slots[source]) for source, place in copies]
        for place, content in read:
            self.slots[place] = Slot(content.state, dict(content.log))

    def forward(self, row: list[int], text: list[int], kept: int) -> None:
        """A row whose whole text is known: the state before it, and the log, have to be of that text."""
        number, start, end = row
        slot = self.slots[number]
        assert not start or slot.state == tuple(text[:start])
        for position in range(max(0, start - SPEC.num_taps + 1), kept):
            assert slot.log[position % SPEC.log_length] == (position, text[position])
        slot.state = tuple(text[:end])
        slot.log |= {position % SPEC.log_length: (position, text[position]) for position in range(kept, len(text))}


class Rig:
    """A manager whose forwards run on the naive device."""

    def __init__(self, num_slots: int = NUM_SLOTS, *, prefix_caching: bool = True) -> None:
        self.states = StateSlots(
            num_slots, SPEC, page_size=PAGE_SIZE, prefix_caching=prefix_caching, snapshot_interval=INTERVAL
        )
        self.manager = KVCacheManager(PagePool(900, PAGE_SIZE), prefix_caching=prefix_caching, states=self.states)
        self.device = Device()

    def forward(self, rows: list[tuple[KVSequence, int, list[int], list[int]]]) -> int:
        """Rows of a sequence, the tokens kept of it, committed tokens and drafts; returns the number of copies."""
        sequences, kept = [row[0] for row in rows], [row[1] for row in rows]
        self.manager.require_states(sequences, kept)
        counts, drafts = [len(row[2]) for row in rows], [len(row[3]) for row in rows]
        self.manager.reserve(sequences, kept, np.add(counts, drafts))
        planned = self.manager.plan_states(sequences, kept, counts, drafts)
        assert planned is not None
        self.device.copy(planned.copies)
        self.states.confirm_copies(planned.copies)
        self.manager.confirm_copies()
        for (sequence, length, ids, guesses), row in zip(rows, planned.numbers.T.tolist(), strict=True):
            self.device.forward(row, [*sequence.token_ids[:length], *ids, *guesses], length)
        self.manager.replace_tails(sequences, kept, [[*row[2], *row[3]] for row in rows])
        return len(planned.copies)


def test_states_follow_their_texts_under_random_operations() -> None:
    source, rig = random.Random(5), Rig()
    manager, committed = rig.manager, dict[KVSequence, int]()
    counts = {"hits": 0, "refused": 0, "cut": 0, "forks": 0}
    for number in range(4000):
        choice = source.random()
        if choice < 0.2:
            text = [source.randrange(2)] * source.choice((30, 60)) + [source.randrange(2) for _ in range(20)]
            try:
                sequence = manager.open(LONGEST)
            except OutOfPagesError:
                counts["refused"] += 1
                continue
            found = manager.adopt_prefix(sequence, text)
            counts["hits"] += found > 0
            size = source.choice((5, 11, 40, 90))
            for start in range(found, len(text), size):
                rig.forward([(sequence, start, text[start : start + size], [])])
            committed[sequence] = len(text)
            manager.commit(sequence, len(text))
        elif choice < 0.4 and committed:
            gone = source.choice(list(committed))
            del committed[gone]
            manager.release(gone)
        elif choice < 0.43 and committed and rig.states.pool.num_free:
            first = source.choice(list(committed))
            manager.truncate(first, committed[first])
            fork = manager.fork(first, LONGEST)
            committed[fork] = committed[first]
            counts["forks"] += 1
        else:
            rows = []
            for sequence in source.sample(list(committed), min(3, len(committed))):
                kept = source.randint(committed[sequence], sequence.length)  # any number of drafts was accepted
                if source.random() < 0.1 and sequence.state is not None:
                    kept = max(1, sequence.state.length, committed[sequence] - source.randint(0, NUM_REWIND_TOKENS))
                counts["cut"] += kept < sequence.length
                if kept < committed[sequence] or source.random() < 0.5:
                    manager.truncate(sequence, kept)
                    committed[sequence] = kept
                drafts = [source.randrange(3) for _ in range(source.randint(0, MOST_DRAFTS))]
                if kept + 1 + len(drafts) <= LONGEST:
                    rows.append((sequence, kept, [source.randrange(3)], drafts))
            if rows:
                rig.forward(rows)
            for sequence, kept, *_ in rows:
                committed[sequence] = kept + 1
                manager.commit(sequence, kept + 1)
        if number % 50 == 0:
            manager.check_integrity()
    assert min(counts.values()) > 20


def test_a_sequence_cannot_be_cut_below_its_state() -> None:
    rig = Rig()
    sequence = rig.manager.open(LONGEST)
    rig.forward([(sequence, 0, list(range(50)), [])])
    assert sequence.state is not None
    assert sequence.state.length == 48  # the end of a page, and few enough tokens before the end
    with pytest.raises(InvalidRequestError, match="the state after 47 tokens is gone"):
        rig.manager.truncate(sequence, 47)
    rig.manager.truncate(sequence, 48)
    rig.manager.truncate(sequence, 0)
    rig.forward([(sequence, 0, [7], [])])


def test_a_plan_that_is_not_run_moves_no_state() -> None:
    rig = Rig()
    sequence = rig.manager.open(LONGEST)
    rig.forward([(sequence, 0, list(range(50)), [])])
    assert sequence.state is not None
    rig.manager.commit(sequence, 50)
    planned = rig.manager.plan_states([sequence], [50], [1], [2])
    assert planned is not None
    assert sequence.state.length == 49
    rig.manager.undo_states([sequence], planned)
    assert sequence.state.length == 48


def test_a_failed_forward_leaves_a_sequence_that_begins_anew() -> None:
    rig = Rig()
    sequence = rig.manager.open(LONGEST)
    rig.forward([(sequence, 0, [1, 2, 3], [])])
    rig.manager.lose_states([sequence])
    with pytest.raises(InvalidRequestError):
        rig.manager.truncate(sequence, 3)
    rig.manager.truncate(sequence, 0)


def test_the_end_of_a_prompt_is_found_and_the_pages_after_it_are_not() -> None:
    rig = Rig()
    text = list(range(50))
    for expected in (0, 48):
        sequence = rig.manager.open(LONGEST)
        assert rig.manager.adopt_prefix(sequence, text) == expected
        rig.forward([(sequence, expected, text[expected:], [])])
        rig.manager.commit(sequence, 50)
        rig.forward([(sequence, 50, [1], [])])  # before which the state is copied
        rig.manager.release(sequence)
    assert rig.manager.prefix_cache is not None
    assert rig.manager.prefix_cache.num_hit_tokens == 48


def test_a_running_sequence_is_copied_at_the_end_of_its_prompt_and_then_once_an_interval() -> None:
    rig = Rig()
    sequence = rig.manager.open(LONGEST)
    rig.forward([(sequence, 0, list(range(50)), [])])
    copied = []
    for length in range(50, LONGEST):
        rig.manager.commit(sequence, length)
        before = sequence.state.length if sequence.state is not None else 0
        if rig.forward([(sequence, length, [1], [])]):
            copied.append(before)
    assert copied == [48, 72, 96]


def test_without_a_free_slot_no_sequence_opens_and_no_snapshot_is_taken() -> None:
    rig = Rig(num_slots=1)
    sequence = rig.manager.open(LONGEST)
    with pytest.raises(OutOfPagesError, match="each of the 1 slots"):
        rig.manager.open(LONGEST)
    rig.forward([(sequence, 0, list(range(50)), [])])
    rig.manager.commit(sequence, 50)
    rig.forward([(sequence, 50, [1], [])])
    rig.manager.release(sequence)
    again = rig.manager.open(LONGEST)
    assert rig.manager.adopt_prefix(again, list(range(50))) == 0
