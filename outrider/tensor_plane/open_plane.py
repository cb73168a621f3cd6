"""A plane that a reader has open: which of its tensors were read, and which places the writer is to have back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.batched import StateBatch
from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind, PlaneReference
from outrider.tensor_plane.endpoints import ReaderEnd, same_or_current_stream

_DONE_AT_ONCE = 16
_DONE_SHARE = 8
"""The writer is told of places that it may use again after this many reads, or once they are this part of the ring, and
otherwise by the thread of the connection: a message for each, or an event on a GPU, would take as long as a read."""
_WIDEST_SHARE = 32
"""Most bytes that are copied for one that is asked for: where all drafts of a step are rejected, some are not."""


class OpenPlane:
    """One plane, and what of it was read. One thread reads, any may do the rest."""

    def __init__(self, kind: PlaneKind, end: ReaderEnd) -> None:
        self.kind, self.end = kind, end
        self.lock = threading.Lock()
        """Lock that is held while bytes are copied: what is given up is not being read."""
        self.floor = 0
        self.was_read: set[int] = set()
        self.is_reported = False
        self._queued: list[int] = []
        """Sequence numbers whose copies have been queued, or made on a CPU, since the last event."""
        self._queued_bytes = self._num_reads = 0
        self._stream: torch.cuda.Stream | None = None
        """Stream of those copies."""
        self._copying: list[tuple[torch.cuda.Event, list[int]]] = []

    def read(self, reference: PlaneReference, content: torch.Tensor, deadline_s: float) -> list[int]:
        """Fetch one tensor into ``content`` [num_bytes] uint8; which places the writer is to be told of.

        ``StaleReferenceError`` when it is not there any more, was read before, or does not come within the deadline.
        """
        if content.numel() != reference.num_bytes:
            raise StaleReferenceError(f"the tensor has {reference.num_bytes} bytes, not {content.numel()}")
        self._await(reference, deadline_s)
        with self.lock:
            self._check(reference.sequence)
            self._copy(content, reference.offset_bytes)
            return self._note([reference.sequence], reference.num_bytes, content.device)

    def read_all(
        self, references: Sequence[PlaneReference], device: torch.device, deadline_s: float
    ) -> tuple[list[torch.Tensor | None], list[int]]:
        """Fetch tensors by as few copies as their places allow: [num_bytes] uint8 of each, None for one of which
        ``read`` says why it cannot be read; and which places the writer is to be told of.
        """
        there = [index for index, each in enumerate(references) if self._is_there(each, deadline_s)]
        found: list[torch.Tensor | None] = [None] * len(references)
        with self.lock:
            once: dict[int, int] = {references[index].sequence: index for index in reversed(there)}
            fresh = [index for sequence, index in once.items() if not self._why_stale(sequence)]
            read: list[PlaneReference] = []
            for begin, end, members in _spans(references, fresh, self.end.widest_gap_bytes):
                span = torch.empty(end - begin, dtype=torch.uint8, device=device)
                try:
                    self._copy(span, begin)
                except StaleReferenceError:
                    continue
                for index in members:
                    each = references[index]
                    found[index] = span[each.offset_bytes - begin :][: each.num_bytes]
                    read.append(each)
            num_bytes = sum([each.num_bytes for each in read])
            return found, self._note([each.sequence for each in read], num_bytes, device) if read else []

    def read_rows(
        self, states: StateBatch, device: torch.device, deadline_s: float, *, are_kept: bool = False
    ) -> tuple[FetchedRows | None, list[int]]:
        """Fetch the states of many sessions by one copy; and which places the writer is to be told of. None, and
        nothing read, where one of them is not there, or they do not lie side by side. ``are_kept``: they can be read
        again.
        """
        rows = _Rows.of(states, self.end.capacity)
        sequences: list[int] = states.sequences.tolist()
        if rows is None or len(set(sequences)) < len(sequences) or any(map(self._why_stale, sequences)):
            return None, []
        until = time.monotonic() + deadline_s
        try:
            for sequence in sequences:
                self.end.wait(sequence, max(0.0, until - time.monotonic()))
            with self.lock:
                if any(map(self._why_stale, sequences)):
                    return None, []
                span = torch.empty(rows.num_bytes, dtype=torch.uint8, device=device)
                self._copy(span, rows.begin)
                found = FetchedRows(span.view(-1, states.row_bytes), rows.gaps())
                if are_kept:
                    return found, []
                return found, self._note(sequences, rows.num_wanted_bytes, device)
        except (StaleReferenceError, torch.OutOfMemoryError):
            return None, []

    def _is_there(self, reference: PlaneReference, deadline_s: float) -> bool:
        try:
            self._await(reference, deadline_s)
        except StaleReferenceError:
            return False
        return True

    def _await(self, reference: PlaneReference, deadline_s: float) -> None:
        if not 0 <= reference.offset_bytes <= self.end.capacity - reference.num_bytes:
            raise StaleReferenceError(f"byte {reference.offset_bytes} is outside a ring of {self.end.capacity}")
        self._check(reference.sequence)
        self.end.wait(reference.sequence, deadline_s)

    def _copy(self, out: torch.Tensor, offset: int) -> None:
        try:
            self.end.read(out, offset)
        except (OSError, RuntimeError) as error:
            raise StaleReferenceError(f"the tensor cannot be read: {error}") from error

    def _check(self, sequence: int) -> None:
        if why := self._why_stale(sequence):
            raise StaleReferenceError(why)

    def _why_stale(self, sequence: int) -> str:
        is_stale = sequence < self.floor or sequence in self.was_read
        return f"tensor {sequence} has been given up, or read before" if is_stale else ""

    def _note(self, sequences: list[int], num_bytes: int, device: torch.device) -> list[int]:
        """Copies were queued on the device's current stream; which places the writer is to be told of. The copy of a
        large part of the ring is waited for, so that the writer has it back before it needs it.
        """
        self.was_read.update(sequences)
        self.end.drop(sequences)
        self._queued += sequences
        self._num_reads += 1
        self._queued_bytes += num_bytes
        self._stream = same_or_current_stream(self._stream, device)
        is_large = num_bytes * _DONE_SHARE >= self.end.capacity
        is_due = self._queued_bytes * _DONE_SHARE >= self.end.capacity or self._num_reads >= _DONE_AT_ONCE
        return self.take_done(wait=is_large) if is_large or is_due else []

    def take_done(self, *, wait: bool = False) -> list[int]:
        """Sequence numbers whose places the writer may use again, and has not been told of."""
        queued, self._queued = self._queued, []
        self._queued_bytes = self._num_reads = 0
        if self._stream is None:
            return queued
        if queued:
            self._copying.append((self._stream.record_event(), queued))
        if wait:
            self._stream.synchronize()
        ended = [event.query() for event, _ in self._copying]  # type: ignore[no-untyped-call]
        done = [one for (_, group), is_done in zip(self._copying, ended, strict=True) if is_done for one in group]
        self._copying = [each for each, is_done in zip(self._copying, ended, strict=True) if not is_done]
        return done

    def raise_floor(self, floor: int) -> None:
        """Release everything below a sequence number; waits for a copy that is under way."""
        with self.lock:
            self.floor = max(self.floor, floor)
            self.was_read = {sequence for sequence in self.was_read if sequence >= self.floor}
            if self._stream is not None and (self._queued or self._copying):
                self._stream.synchronize()
            self.end.raise_floor(self.floor)


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """States of many sessions as they lay in the ring, those between them too."""

    rows: torch.Tensor  # [M, row_bytes] uint8
    firsts: NDArray[np.int64] | None  # [B]
    """First row of each session; None: one follows the other, with nothing between."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one size in a span of the ring."""

    begin: int
    num_bytes: int
    """Size of the span."""
    num_wanted_bytes: int
    firsts: NDArray[np.int64]  # [B] of each session, counted from the span's begin
    counts: NDArray[np.int64]  # [B]

    @classmethod
    def of(cls, states: StateBatch, capacity: int) -> _Rows | None:
        """None where they are not all in a ring of ``capacity``, are no whole rows apart, or lie far apart."""
        row_bytes, counts = states.row_bytes, states.counts.astype(np.int64)
        if int(states.offsets_bytes.max()) > capacity or int(counts.max()) * row_bytes > capacity:
            return None
        offsets = states.offsets_bytes.astype(np.int64)
        begin, end = int(offsets.min()), int((offsets + counts * row_bytes).max())
        asked = int(counts.sum()) * row_bytes
        firsts, rest = np.divmod(offsets - begin, row_bytes)
        if end > capacity or asked > capacity or rest.any() or end - begin > _WIDEST_SHARE * asked:
            return None
        return cls(begin, end - begin, asked, firsts, counts)

    def gaps(self) -> NDArray[np.int64] | None:  # [B]
        """``FetchedRows.firsts``."""
        follows = np.array_equal(self.firsts, self.counts.cumsum() - self.counts)
        return None if follows else self.firsts


def _spans(
    references: Sequence[PlaneReference], indices: Sequence[int], widest_gap: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of places with no wider gap in them: first byte, end, and whose places they are."""
    members: list[int] = []
    begin = end = 0
    for index in sorted(indices, key=lambda index: references[index].offset_bytes):
        each = references[index]
        if members and each.offset_bytes > end + widest_gap:
            yield begin, end, members
            members = []
        if not members:
            begin = end = each.offset_bytes
        members.append(index)
        end = max(end, each.offset_bytes + each.num_bytes)
    if members:
        yield begin, end, members
