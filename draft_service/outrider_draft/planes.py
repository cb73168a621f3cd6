"""The draft's tensor plane: connections to targets whose hidden states it reads, and the states of an item fetched.

Owns nothing of how bytes travel, which is ``outrider.tensor_plane``'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from outrider.batched import CommandBatch, ExtendBatch
from outrider.errors import StaleReferenceError, UnavailableError
from outrider.planes import PlaneKind, PlaneOffer
from outrider.ports import ClosePlane, Extend, OfferPlane, PlaneCommand, PlaneEvent
from outrider.readings import Reading
from outrider.serving.in_process.plane_host import refusal
from outrider.tensor_plane.reader import PlaneReader, PlaneReaders
from outrider.types import HiddenStates

MAX_CONNECTIONS = 64
"""Bound on the planes of one link; a ring of each takes memory."""
_FEWEST_TOGETHER = 2
"""Least number of sessions whose states are read together."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CommandT = TypeVar("CommandT")


class DraftPlanes:
    """Connections to targets, by link and number. Commands and ``fetch`` come from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kinds = tuple(str(kind) for kind in PlaneKind if kind is not PlaneKind.INLINE)
        """Kinds of planes that it can read; those that two processes can use are found by trying."""
        self._readers = PlaneReaders(device)
        self._open: dict[tuple[int, int], PlaneReader | None] = {}
        """None: it is being connected."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_stale = 0

    def handle(self, link_id: int, command: PlaneCommand, tell: Callable[[PlaneEvent], None]) -> None:
        """Connect to a target, in a thread, or end a connection."""
        key = link_id, command.connection
        if isinstance(command, ClosePlane):
            self._end(key)
        elif isinstance(command, OfferPlane):
            with self._lock:
                self._open = {place: each for place, each in self._open.items() if each is None or not each.is_closed}
                num_open = sum(other == link_id for other, _ in self._open)
                if key in self._open or num_open >= MAX_CONNECTIONS or self._is_closed:
                    tell(refusal(command.connection, f"the draft has {num_open} connections of this link"))
                    return
                self._open[key] = None
            connect = threading.Thread(
                target=self._connect, args=(key, command.offer, tell), name="tensor-plane-connect", daemon=True
            )
            connect.start()

    def fetch(self, item: Extend) -> Extend:
        """The item with the states that it refers to; ``StaleReferenceError`` when they are not there any more."""
        states = item.hidden_states
        if states is None or not states.references:
            return item
        try:
            return replace(item, hidden_states=self._fetched(states))
        except StaleReferenceError:
            self._num_stale += 1
            raise

    def fetch_all(self, commands: Sequence[CommandT]) -> Sequence[CommandT]:
        """The commands of one message with all states that they refer to and that can be read, by as few copies as the
        places allow: those of a step lie side by side. The others keep their references.
        """
        referring = [
            (place, states)
            for place, command in enumerate(commands)
            if isinstance(command, Extend) and (states := command.hidden_states) is not None and states.references
        ]
        if len(referring) < _FEWEST_TOGETHER:
            return commands
        contents = iter(self._readers.read_all([each for _, states in referring for each in states.references]))
        found: list[Any] = list(commands)
        for place, states in referring:
            parts = [next(contents) for _ in states.references]
            if (received := _received(states, parts)) is not None:
                found[place] = replace(found[place], hidden_states=received)
        return found

    def fetch_batch(self, batched: CommandBatch, *, are_kept: bool = False) -> CommandBatch:
        """The commands with the states that they refer to, fetched by one copy; as they are where that cannot be done,
        for each to be read by itself. ``are_kept``: others may read them again.
        """
        if not isinstance(batched, ExtendBatch):
            return batched
        states = batched.states
        if states is None or not np.array_equal(states.counts, batched.counts):
            return batched
        found = self._readers.read_rows(states, are_kept=are_kept)
        if found is None:
            return batched
        tensor = found.rows.view(_DTYPES[states.dtype])
        return replace(batched, states=replace(states, tensor=tensor, firsts=found.firsts))

    def drop_link(self, link_id: int) -> None:
        """End the connections of a link."""
        for key in [key for key in list(self._open) if key[0] == link_id]:
            self._end(key)

    def readings(self) -> list[Reading]:
        """References that could not be read."""
        return [Reading("outrider_stale_references_total", self._num_stale)]

    def close(self) -> None:
        """End all connections; idempotent."""
        with self._lock:
            self._is_closed = True
        self._readers.close()

    def _fetched(self, states: HiddenStates) -> HiddenStates:
        out = torch.empty(states.num_rows, states.width, dtype=_DTYPES[states.dtype], device=self._device)
        content = out.view(-1).view(torch.uint8)
        begin = 0
        for reference in states.references:
            self._readers.read(reference, content[begin : begin + reference.num_bytes])
            begin += reference.num_bytes
        return _with_tensor(states, out)

    def _connect(self, key: tuple[int, int], offer: PlaneOffer, tell: Callable[[PlaneEvent], None]) -> None:
        try:
            reader = self._readers.accept(offer)
        except UnavailableError as error:
            with self._lock:
                self._open.pop(key, None)
            tell(refusal(key[1], str(error)))
            return
        with self._lock:
            is_wanted = key in self._open and not self._is_closed
            if is_wanted:
                self._open[key] = reader
        if not is_wanted:
            reader.close()

    def _end(self, key: tuple[int, int]) -> None:
        with self._lock:
            reader = self._open.pop(key, None)
        if reader is not None:
            threading.Thread(target=reader.close, name="tensor-plane-end", daemon=True).start()


def _received(states: HiddenStates, parts: Sequence[torch.Tensor | None]) -> HiddenStates | None:
    """The states with the bytes of their references; None where some are not there, or are not this many."""
    there = [part for part in parts if part is not None]
    num_bytes = states.num_rows * states.width * _DTYPES[states.dtype].itemsize
    if len(there) < len(parts) or sum(part.numel() for part in there) != num_bytes:
        return None
    content = there[0] if len(there) == 1 else torch.cat(there)
    return _with_tensor(states, content.view(_DTYPES[states.dtype]).view(states.num_rows, states.width))


def _with_tensor(states: HiddenStates, tensor: torch.Tensor) -> HiddenStates:
    return HiddenStates(states.start, states.num_rows, states.width, states.dtype, b"", (), tensor)
