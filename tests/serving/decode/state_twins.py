"""Twins whose items bring hidden states, or ask for them: references of one plane, sound and unsound.

Owns what stands in for the plane's two ends: contents follow from a reference's sequence number, and each is read once.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.batched import CommandBatch, ExtendBatch
from outrider.errors import StaleReferenceError
from outrider.planes import ID_BYTES, PlaneReference
from outrider.ports import Extend, Score
from outrider.types import HiddenStates
from tests.serving.decode.twins import Known, Twins

PLANE = b"p" * ID_BYTES
STALE = 41
"""Every so many-th sequence number is of bytes that are gone."""


class ReadStates:
    """``References`` for the states that a draft reads."""

    def __init__(self) -> None:
        self._was_read: set[int] = set()

    def fetch_all(self, commands: Sequence[Any]) -> Sequence[Any]:
        """Each is read when its session takes it."""
        return commands

    def fetch_batch(self, batched: CommandBatch, *, are_kept: bool = False) -> CommandBatch:
        if not isinstance(batched, ExtendBatch) or batched.states is None:
            return batched
        states = batched.states
        sequences = states.sequences.tolist()
        if len(set(sequences)) < len(sequences) or any(map(self._is_stale, sequences)):
            return batched
        parts = [self._read(own) for own in states.hidden_states()]
        if sequences[0] % 2:
            return replace(batched, states=replace(states, tensor=torch.cat(parts)))
        # As they lie in a ring where drafts were rejected: in any order, and with others' between them.
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(sequences[0])).tolist()
        firsts, laid, length = np.zeros(len(parts), dtype=np.int64), list[torch.Tensor](), 0
        for place in order:
            firsts[place] = length
            laid += [parts[place], torch.full_like(parts[place][:1], torch.nan)]
            length += len(parts[place]) + 1
        return replace(batched, states=replace(states, tensor=torch.cat(laid), firsts=firsts))

    def fetch(self, item: Extend) -> Extend:
        states = item.hidden_states
        if states is None or not states.references:
            return item
        if self._is_stale(states.references[0].sequence):
            raise StaleReferenceError("gone, or read before")
        own = HiddenStates(states.start, states.num_rows, states.width, states.dtype, b"", (), self._read(states))
        return replace(item, hidden_states=own)

    def _is_stale(self, sequence: int) -> bool:
        return sequence in self._was_read or sequence % STALE == 0

    def _read(self, states: HiddenStates) -> torch.Tensor:
        sequence = states.references[0].sequence
        self._was_read.add(sequence)
        generator = torch.Generator().manual_seed(sequence)
        return torch.randn(states.num_rows, states.width, generator=generator)


class HeadTwins(Twins):
    """Drafts that read states of ``width`` values."""

    max_length = 200
    prompt_lengths = (2, 7, 30, 120)

    def __init__(self, *arguments: Any, width: int, **named: Any) -> None:
        super().__init__("draft", *arguments, **named)
        self._width, self._next_sequence = width, 1

    def _item(self, session: Known) -> Extend | Score:
        item = super()._item(session)
        if not isinstance(item, Extend):
            return item
        start, end = max(0, item.num_kept_tokens - 1), item.num_kept_tokens + len(item.token_ids) - 1
        if end <= start:
            return item
        self._next_sequence += 1
        states: HiddenStates | None = self._states(start, end - start, self._next_sequence)
        if self._chance(self._oddity / 3):
            states = self._lying(start, end - start)
        return replace(item, hidden_states=states)

    def _states(self, start: int, num_rows: int, sequence: int, width: int | None = None) -> HiddenStates:
        width = width or self._width
        place = PlaneReference(PLANE, 256 * sequence, 4 * width * num_rows, sequence)
        return HiddenStates(start, num_rows, width, "float32", b"", (place,))

    def _lying(self, start: int, num_rows: int) -> HiddenStates | None:
        """Invalid states: other positions, more or fewer rows, another width, read before or given up; or none."""
        sequence, wrong = self._next_sequence, self._random.randrange(7)
        if wrong == 0:
            return self._states(start + 1, num_rows, sequence)
        if wrong in (1, 2):
            return self._states(start, num_rows + (1 if wrong == 1 else max(-1, 1 - num_rows)), sequence)
        if wrong == 3:
            return self._states(start, num_rows, sequence, self._width + 2)
        if wrong == 4:
            return self._states(start, num_rows, max(1, sequence - self._random.randint(1, 9)))
        return self._states(start, num_rows, STALE * sequence) if wrong == 5 else None

    def _held_after(self, base: int, num_accepted: int, num_drafts: int) -> int:
        """Tokens held after a verdict: the head computes its own anew, from the target's states."""
        return base

    def _pages_of(self, sequence: Any) -> list[int]:
        return [] if sequence.kv is None else [sequence.kv.length, *sequence.kv.page_table]


class PutStates:
    """``TargetPlanes`` with one writer, whose sequence numbers say what was put."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.report = SimpleNamespace(kind="fake")
        self.num_puts = 0
        self.is_full = False

    def writer(self, link_id: int, connection: int) -> PutStates | None:
        """Writer of connection 1, the only one."""
        return self if connection == 1 else None

    def put(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[PlaneReference] | None:
        """References to the rows, unless there is no room."""
        self.num_puts += 1
        if self.is_full:
            return None
        row_bytes = rows.shape[1] * rows.element_size()
        parts = torch.split(rows, list(sizes))
        return [
            PlaneReference(PLANE, 0, size * row_bytes, zlib.crc32(part.contiguous().numpy().tobytes()))
            for size, part in zip(sizes, parts, strict=True)
        ]


class StatesTwins(Twins):
    """Targets that are asked for states, and whose planes are full now and then."""

    def __init__(self, planes: Sequence[PutStates], *arguments: Any, **named: Any) -> None:
        super().__init__("target", *arguments, **named)
        self._planes = planes

    def _round(self) -> None:
        is_full = self._chance(0.2)
        for each in self._planes:
            each.is_full = is_full
        super()._round()

    def _open(self) -> None:
        layers = (0, 2) if self._chance(1 - self._oddity / 4) else (2, 0)
        self._layers = layers if self._chance(1 - self._oddity / 8) else ()
        super()._open()

    def _dressed(self, opening: Any) -> Any:
        return replace(opening, hidden_state_layers=self._layers)

    def _item(self, session: Known) -> Extend | Score:
        item = super()._item(session)
        if not isinstance(item, Score) or self._chance(self._oddity / 4):
            return item
        odd = self._random.choice((-1, 1, 50)) if self._chance(self._oddity / 4) else 0
        first = max(0, item.num_kept_tokens + odd)
        plane = 1 if self._chance(1 - self._oddity / 4) else self._random.choice((0, 7))
        return replace(item, hidden_states_from=first, plane=plane)
