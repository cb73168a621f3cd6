"""The writing end of a connection: a target's, one for each draft that reads its tensors.

Owns the ring's books, the choice of a plane, and what is done when a plane or the peer fails. ``put`` never waits:
where there is no plane or no room, the tensor has to travel inline.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from outrider.planes import PlaneKind, PlaneOffer, PlaneReference, PlaneReport
from outrider.tensor_plane.control import ControlConnection, ControlListener, Message
from outrider.tensor_plane.endpoints import PlaneLimits
from outrider.tensor_plane.negotiation import Chosen, Negotiation
from outrider.tensor_plane.ring import Ring, Use

_log = logging.getLogger(__name__)

_TICK_S = 0.1
"""Interval of the checks that the reader is still there."""
_MANY_UNREAD = 64
"""Uses through which a search for room takes longer than to hear of those that the reader is done with."""

AUTOMATIC: tuple[PlaneKind, ...] = (
    PlaneKind.CUDA_IPC,
    PlaneKind.NCCL,
    PlaneKind.SHARED_MEMORY,
    PlaneKind.GLOO,
)


OnReport = Callable[[PlaneReport, bool], None]
"""Callback for each choice, and last, with True, that the connection has ended. Called from its threads."""


class PlaneWriter:
    """Tensors to one reader. ``put`` is called by one thread, the rest may be by any."""

    def __init__(
        self,
        device: torch.device,
        *,
        kinds: Sequence[PlaneKind] = AUTOMATIC,
        limits: PlaneLimits | None = None,
        on_report: OnReport | None = None,
    ) -> None:
        """``kinds``: those that may be used; one alone is a forced one."""
        self.device = device
        self.limits = limits or PlaneLimits()
        self.report = PlaneReport(PlaneKind.INLINE, reasons=(("others", "no reader has come yet"),))
        self.is_closed = False
        self._kinds = tuple(kind for kind in kinds if kind is not PlaneKind.INLINE)
        self._on_report = on_report
        self._failed: dict[PlaneKind, str] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._control: ControlConnection | None = None
        self._thread: threading.Thread | None = None
        self._chosen: Chosen | None = None
        self._ring = Ring(0)
        self._floor_asked = 0
        self._received_at = self._said_at = 0.0

    def serve(self, control: ControlConnection) -> None:
        """Serve the reader that has connected, until either end closes; runs in the connection's thread."""
        self._control, self._thread = control, threading.current_thread()
        try:
            while not self._stopping.is_set():
                self._choose(control)
                self._watch(control)
        except OSError as error:
            if not self._stopping.is_set():
                _log.info("the reader of this tensor plane is gone: %s", error)
        finally:
            self.close()

    def put(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[PlaneReference] | None:
        """Place ``rows`` [N, ...], contiguous, as one reference for each of ``sizes``, which count rows and sum to N.

        None where they have to travel inline: no plane, or no room. On a GPU the copy is queued on the current stream,
        and the references may be given out once what was queued after it has been awaited, or after ``synchronize``.
        """
        with self._lock:
            chosen, control = self._chosen, self._control
            if chosen is None or control is None or not rows.numel():
                return None
            content = rows.reshape(-1).view(torch.uint8)
            row_bytes = content.numel() // rows.shape[0]
            uses = self._place(control, [size * row_bytes for size in sizes])
            if uses is None:
                return None
            try:
                chosen.end.write(content, uses[0].begin, {use.sequence: (use.begin, use.end) for use in uses})
            except OSError as error:
                chosen.trouble = f"it cannot be written to: {error}"
                return None
            return [PlaneReference(chosen.plane_id, use.begin, use.end - use.begin, use.sequence) for use in uses]

    def _place(self, control: ControlConnection, sizes: Sequence[int]) -> list[Use] | None:
        """Space for each of these numbers of bytes.

        Asks for what the reader has finished only where there is no room, or the ring is long to search: the other
        thread takes it otherwise.
        """
        is_quick = self._ring.num_unread <= _MANY_UNREAD
        uses = self._ring.place(sizes, time.monotonic()) if is_quick else None
        if uses is not None:
            return uses
        try:
            self._take(control.receive(0.0))
        except OSError:
            return None  # the thread beside sees it too
        return self._ring.place(sizes, time.monotonic())

    def synchronize(self) -> None:
        """Return when all that was put may be read, or has failed."""
        chosen = self._chosen
        if chosen is not None:
            chosen.end.synchronize()

    @property
    def num_unread(self) -> int:
        """References that the reader has not fetched."""
        with self._lock:
            return self._ring.num_unread

    def close(self) -> None:
        """End the connection and free everything; idempotent."""
        self._stopping.set()
        was_closed, self.is_closed = self.is_closed, True
        if self._control is not None:
            self._control.close()
        self._drop("the connection is closed")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * self.limits.transfer_s)
        if not was_closed and self._on_report is not None:
            self._on_report(self.report, True)

    def _choose(self, control: ControlConnection) -> None:
        """Agree on a plane; ``OSError`` when the reader is gone."""
        talk = Negotiation(control, self.device, control.local_host, self.limits)
        chosen, report = talk.choose(self._kinds, self._failed)
        with self._lock:
            if chosen is not None:
                self._ring = Ring(chosen.end.capacity)
            self._chosen = chosen
            self._floor_asked = 0
            self._received_at = time.monotonic()
            self.report = report
        talk.tell(report)
        if self._stopping.is_set():
            self._drop("the connection is closed")
        _log.info("tensor plane: %s", report.text())
        if self._on_report is not None:
            self._on_report(report, False)

    def _watch(self, control: ControlConnection) -> None:
        """Watch the reader until the plane is of no use any more; ``OSError`` when the reader is gone."""
        while not self._stopping.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                self._take(control.receive(0.0))
                trouble = self._trouble(now)
            if trouble is not None and self._chosen is not None:
                self._failed[self._chosen.kind] = trouble
                control.send({"type": "drop", "plane": self._chosen.plane_id.hex()})
                self._drop(trouble)
                return
            if now - self._received_at > self.limits.silence_s:
                raise TimeoutError(f"nothing was received from it for {self.limits.silence_s:g} s")
            self._say(control, now)

    def _trouble(self, now: float) -> str | None:
        if self._chosen is None:
            return None
        return self._chosen.trouble or self._chosen.end.trouble(now, self.limits.transfer_s)

    def _say(self, control: ControlConnection, now: float) -> None:
        """A heartbeat, which says below what nothing is read any more."""
        with self._lock:
            late = self._ring.expired(now, self.limits.unread_s)
            floor = max(late or 0, self._ring.floor)
            plane_id = b"" if self._chosen is None else self._chosen.plane_id
        if floor > self._floor_asked or now - self._said_at > self.limits.silence_s / 10:
            control.send({"type": "floor", "plane": plane_id.hex(), "below": floor})
            self._floor_asked, self._said_at = floor, now

    def _take(self, messages: Sequence[Message]) -> None:
        if messages:
            self._received_at = time.monotonic()
        chosen = self._chosen
        for message in messages:
            if chosen is None or message.get("plane") != chosen.plane_id.hex():
                continue  # of another plane, or a heartbeat
            try:
                self._take_one(chosen, message)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise ConnectionError(f"a message that cannot be read: {error}") from error

    def _take_one(self, chosen: Chosen, message: Message) -> None:
        if message["type"] == "done":
            self._ring.finish(int(sequence) for sequence in message["sequences"])
        elif message["type"] == "floor":
            self._ring.raise_floor(int(message["below"]))
        elif message["type"] == "broken":
            chosen.trouble = str(message["reason"])[:200]

    def _drop(self, reason: str) -> None:
        with self._lock:
            chosen, self._chosen = self._chosen, None
            self._ring = Ring(0)
            self.report = PlaneReport(PlaneKind.INLINE, reasons=(("others", reason),))
        if chosen is not None:
            chosen.end.close()


class PlaneWriters:
    """All connections of one service that writes."""

    def __init__(
        self,
        device: torch.device,
        host: str = "127.0.0.1",
        *,
        kinds: Sequence[PlaneKind] = AUTOMATIC,
        limits: PlaneLimits | None = None,
    ) -> None:
        """``host`` may be a wildcard; offers then contain it, and the coordinator fills in the address."""
        self._device, self._kinds, self._limits = device, kinds, limits
        self._listener = ControlListener(host)
        self._writers: dict[bytes, PlaneWriter] = {}
        self._lock = threading.Lock()
        # An interpreter that ends under a thread inside torch ends with an abort.
        atexit.register(self.close)

    def offer(self, on_report: OnReport | None = None) -> PlaneOffer:
        """An offer for one more reader; ``writer`` finds the connection that is made with it."""
        offer = self._listener.new_offer()
        writer = PlaneWriter(self._device, kinds=self._kinds, limits=self._limits, on_report=on_report)
        with self._lock:
            self._writers = {key: each for key, each in self._writers.items() if not each.is_closed}
            self._writers[offer.offer_id] = writer
        self._listener.expect(offer, writer.serve)
        return offer

    def writer(self, offer_id: bytes) -> PlaneWriter | None:
        """The connection of an offer; None when it has ended."""
        found = self._writers.get(offer_id)
        return None if found is None or found.is_closed else found

    def withdraw(self, offer: PlaneOffer) -> None:
        """End the connection of an offer, or accept none for it."""
        self._listener.drop(offer)
        with self._lock:
            found = self._writers.pop(offer.offer_id, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """End all connections; idempotent."""
        atexit.unregister(self.close)
        self._listener.close()
        with self._lock:  # others may be withdrawn meanwhile
            writers = list(self._writers.values())
        for writer in writers:
            writer.close()
