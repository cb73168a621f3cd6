"""Arrivals of pushed tensors: which of them are there, as the receiving thread or the card reports.

Owns waiting for one tensor. A thread that sleeps until a transfer has ended is woken by an interrupt, some time after
the bytes came, and then has to wake the reader. So a reader asks the card itself for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from outrider.errors import StaleReferenceError

_ASKING_S = 2e-3
"""Polling time of a reader: longer than a transfer takes whose writer has sent it already."""


class ArrivedTensors:
    """Tensors by sequence number. ``wait`` and ``drop`` are called by the thread that reads, the rest by any."""

    def __init__(self, has_ended: Callable[[torch.cuda.Event], bool] | None = None) -> None:
        """``has_ended``: whether the transfer before an event is done, and was not given up; None where no card
        receives, so that only the receiving thread knows.
        """
        self._has_ended = has_ended
        self._arrived: set[int] = set()
        self._under_way: dict[int, torch.cuda.Event] = {}
        """Number of tensors that a card receives and that are not read yet."""
        self._changed = threading.Condition()

    def note_queued(self, sequences: Sequence[int], event: torch.cuda.Event) -> None:
        """A card receives these, and then passes the event."""
        with self._changed:
            self._under_way.update(dict.fromkeys(sequences, event))

    def note_arrived(self, sequences: Sequence[int]) -> None:
        """The receiving thread has received these. Those that were read before are not kept."""
        with self._changed:
            for sequence in sequences:
                if self._has_ended is None or self._under_way.pop(sequence, None) is not None:
                    self._arrived.add(sequence)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those that wait look again why nothing comes."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, sequence: int, deadline_s: float, trouble: Callable[[], str | None]) -> None:
        """Return when a tensor is there; ``StaleReferenceError`` when it does not come within the deadline, or as soon
        as there is ``trouble``.
        """
        began = time.monotonic()
        until = began + deadline_s
        if self._comes_soon(sequence, began + min(deadline_s, _ASKING_S)):
            return
        with self._changed:
            while sequence not in self._arrived:
                left = until - time.monotonic()
                reason = trouble()
                if left <= 0 or reason is not None:
                    raise StaleReferenceError(f"the tensor did not arrive within {deadline_s:g} s ({reason})")
                self._changed.wait(left)

    def drop(self, sequences: Sequence[int]) -> None:
        """Drop arrivals that were read."""
        with self._changed:
            self._arrived.difference_update(sequences)
            for sequence in sequences:
                self._under_way.pop(sequence, None)

    def raise_floor(self, floor: int) -> None:
        """No lower number is read any more."""
        with self._changed:
            self._arrived = {sequence for sequence in self._arrived if sequence >= floor}
            self._under_way = {key: event for key, event in self._under_way.items() if key >= floor}

    def _comes_soon(self, sequence: int, until: float) -> bool:
        if self._has_ended is None:
            return False
        while sequence not in self._arrived:
            event = self._under_way.get(sequence)
            if event is not None and self._has_ended(event):
                break
            if time.monotonic() > until:
                return False
            time.sleep(0)  # lets the receiving thread in, which may not have begun
        return True
