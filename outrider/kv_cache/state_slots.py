"""State slots: where the recurrent layers of a model keep each sequence's state, and how far that state is.

A sequence holds one slot from its opening to its release. The slot has the state after the first ``length`` tokens of
the sequence (the checkpoint) and a log of the inputs of the tokens after them. A forward replays the log from the
checkpoint to the tokens that are kept, so a sequence can be truncated to any number of tokens that is no less than the
checkpoint, or to none. On the way the forward may move the checkpoint; which tokens it moves to is decided here, row by
row: not past those that are committed, as long as the log has room for the rest.

Checkpoints at the end of a page can be copied to slots of their own and found by the page's key. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import IntegrityError, InvalidRequestError, OutOfPagesError
from outrider.kv_cache.groups import RecurrentSpec
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.prefix_cache import PrefixCache

SlotCopy = tuple[int, int]
"""(source slot, destination slot)."""
NUM_REWIND_TOKENS = 1
"""Committed tokens by which a sequence can be truncated: its last one is computed again. Cut further, it begins anew.
Every forward replays them."""
DEFAULT_SNAPSHOT_INTERVAL = 1024
"""Tokens between snapshots: fewer cost memory, more cost prefill after a prefix hit."""
NUM_COLUMNS = 3
"""Numbers of a row of a forward."""


@dataclass(slots=True)
class SequenceState:
    """Slot of a sequence."""

    slot: int
    length: int = 0
    """Tokens after which the slot's state is; with 0 its content means nothing."""
    num_committed: int = 0
    snapshot_length: int = 0
    """Tokens of the last snapshot that was taken of it."""
    prompt_length: int = 0
    """Tokens after which the last chunk of a prompt left the state."""

    def reaches(self, length: int) -> bool:
        """True if the state after ``length`` tokens can be computed from what the slot has."""
        return not 0 < length < self.length


@dataclass(frozen=True, slots=True)
class StateRows:
    """States of the rows of a forward."""

    numbers: NDArray[np.int32]  # [3, B] slot, tokens of its state before the forward, and after it
    copies: tuple[SlotCopy, ...]
    """Done before anything else: all sources are read before any destination is written."""

    def padded(self, num_rows: int) -> NDArray[np.int32]:  # [3 * num_rows]
        """Rows padded with rows that have no slot."""
        found = np.full((NUM_COLUMNS, num_rows), -1, dtype=np.int32)
        found[:, : self.numbers.shape[1]] = self.numbers
        return found.reshape(-1)


class StateSlots:
    """Slots of all sequences of one model, and of snapshots of their states."""

    def __init__(
        self,
        num_slots: int,
        spec: RecurrentSpec,
        *,
        page_size: int,
        prefix_caching: bool,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
    ) -> None:
        """Snapshots of one sequence are at least ``snapshot_interval`` tokens apart, but for the one at the end of a
        prompt.
        """
        self.pool = PagePool(num_slots, 1)
        self.snapshots = PrefixCache(self.pool) if prefix_caching else None
        self._pending: dict[int, int] = {}
        """Destination -> source of copies that the next forward makes first. Sources are held until then."""
        self._num_replayed, self._page_size, self._interval = spec.num_replayed, page_size, snapshot_interval

    def open(self) -> SequenceState:
        """The slot of a new sequence; ``OutOfPagesError`` if none is free."""
        if not self.pool.num_free:
            raise OutOfPagesError(f"each of the {self.pool.num_pages} slots for recurrent states is held by a sequence")
        return SequenceState(self._take())

    def release(self, state: SequenceState) -> None:
        """Give a sequence's slot back."""
        self._drop_copy(state.slot)
        self.pool.release([state.slot])

    def fork(self, state: SequenceState, fork: SequenceState) -> None:
        """Give an empty sequence the state of one with the same tokens."""
        fork.length, fork.num_committed, fork.snapshot_length = (
            state.length, state.num_committed, state.snapshot_length,
        )  # fmt: skip
        self._copy(state.slot, fork.slot)

    def adopt(self, state: SequenceState, keys: Sequence[bytes]) -> int:
        """Begin an empty sequence at the last snapshot among its pages with these ``keys``; returns the number of
        pages.
        """
        if self.snapshots is None:
            return 0
        for count in range(len(keys), 0, -1):
            if found := self.snapshots.find([keys[count - 1]], num_tokens=0):
                self._copy(found[0], state.slot)
                state.length = state.num_committed = state.snapshot_length = count * self._page_size
                return count
        return 0

    def require(self, state: SequenceState, length: int) -> None:
        """Raise ``InvalidRequestError`` if a sequence cannot be truncated to ``length`` tokens."""
        if not state.reaches(length):
            raise InvalidRequestError(
                "length", f"the state after {length} tokens is gone: {state.length} are behind it"
            )

    def truncate(self, state: SequenceState, length: int) -> None:
        """The sequence is truncated, or its tokens from ``length`` on are replaced."""
        self.require(state, length)
        state.num_committed = min(state.num_committed, length)
        if not length:
            state.length = state.snapshot_length = 0

    def set_back(self, state: SequenceState, length: int) -> None:
        """The state is where a decode step after ``length`` committed tokens finds it, for measurements: its content is
        another's. The step replays as many tokens as in a service, and moves the checkpoint.
        """
        state.num_committed, state.length = length, max(0, length - NUM_REWIND_TOKENS - 1)

    def plan(
        self, states: Sequence[SequenceState], kept: Sequence[int], counts: Sequence[int], num_drafts: Sequence[int]
    ) -> StateRows:
        """Move the checkpoints of the rows of a forward, which appends ``counts`` tokens and ``num_drafts`` drafts
        after those that are ``kept``, which ``require`` has let pass.
        """
        numbers = np.empty((NUM_COLUMNS, len(states)), dtype=np.int32)
        for row, (state, length, count, drafts) in enumerate(zip(states, kept, counts, num_drafts, strict=True)):
            if not length:
                state.length = state.snapshot_length = 0
            before, state.length = state.length, self._next(state, length, count, drafts)
            if count > self._num_replayed:
                state.prompt_length = state.length
            numbers[:, row] = state.slot, before, state.length
        return StateRows(numbers, self._due_copies())

    def undo(self, states: Sequence[SequenceState], rows: StateRows) -> None:
        """A planned forward is not run."""
        for state, before in zip(states, rows.numbers[1].tolist(), strict=True):
            state.length = before

    def is_due(self, state: SequenceState, count: int) -> bool:
        """True if a snapshot is to be taken before a forward appends ``count`` tokens."""
        if self.snapshots is None or state.length % self._page_size or state.length <= state.snapshot_length:
            return False
        ends_prompt = count <= self._num_replayed and state.length == state.prompt_length
        return ends_prompt or state.length - state.snapshot_length >= self._interval

    def snapshot(self, state: SequenceState, key: bytes) -> None:
        """Keep a copy of a sequence's state, to be found by the ``key`` of its last page, if there is a slot for it."""
        state.snapshot_length = state.length
        if self.snapshots is None or self.snapshots.holds(key) or not self.pool.num_free:
            return
        slot = self._take()
        self.snapshots.register(slot, key)
        self._copy(state.slot, slot)
        self.pool.release([slot])

    def confirm_copies(self, copies: Iterable[SlotCopy]) -> None:
        """Record that copies of a planned forward were made."""
        for _, destination in copies:
            self._drop_copy(destination)

    def check_integrity(self, states: Iterable[SequenceState]) -> None:
        """Raise ``IntegrityError``, naming the violation, unless every slot has one holder."""
        slots = [state.slot for state in states]
        self.pool.check_integrity([[slot] for slot in (*slots, *self._pending.values())])
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        if len(set(slots)) < len(slots):
            raise IntegrityError("two sequences hold one slot")

    def _next(self, state: SequenceState, kept: int, count: int, drafts: int) -> int:
        """Tokens after which the state is once a forward has run: at most those that are committed before it, unless
        the log has no room for all others. Of prompts' chunks the last page's end, which a snapshot can be taken of.
        """
        wanted = max(state.length, min(kept, state.num_committed) - NUM_REWIND_TOKENS)
        if self.snapshots is not None and (end := wanted // self._interval * self._interval) > state.length:
            wanted = end
        least = kept + count + drafts - self._num_replayed
        if wanted >= least:
            return wanted
        page_end = (kept + count - NUM_REWIND_TOKENS) // self._page_size * self._page_size
        return max(least, page_end)

    def _take(self) -> int:
        (slot,) = self.pool.allocate(1)
        self._drop_copy(slot)  # of a snapshot that was evicted before it was made
        return slot

    def _copy(self, source: int, destination: int) -> None:
        self.pool.share([source])
        self._pending[destination] = source

    def _drop_copy(self, destination: int) -> None:
        if (source := self._pending.pop(destination, None)) is not None:
            self.pool.release([source])

    def _due_copies(self) -> tuple[SlotCopy, ...]:
        """Copies from slots that have their content: of one that itself awaits a copy, from where that comes."""
        return tuple((self._origin(source), destination) for destination, source in self._pending.items())

    def _origin(self, slot: int) -> int:
        while (source := self._pending.get(slot)) is not None:
            slot = source
        return slot
