"""The reading end of connections: a draft's, one for each target whose tensors it reads.

Owns that no reference is read that is stale, or whose place was given back. A thread for each connection answers the
writer, so that heartbeats go on while the service computes.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from outrider.batched import StateBatch
from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind, PlaneOffer, PlaneReference, PlaneReport
from outrider.tensor_plane.control import ControlConnection, Message, connect
from outrider.tensor_plane.endpoints import PeerFacts, PlaneLimits, current_stream
from outrider.tensor_plane.open_plane import FetchedRows, OpenPlane
from outrider.tensor_plane.opening import OPENING_ERRORS, open_reader

_log = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 50
"""Number of checks by that thread within the time after which a peer is lost."""


class PlaneReader:
    """Tensors from one writer. ``read`` is called by one thread, the rest may be by any."""

    def __init__(self, offer: PlaneOffer, device: torch.device, *, limits: PlaneLimits | None = None) -> None:
        """Connect, and ``start``; ``UnavailableError`` when the writer cannot be reached."""
        self.device = device
        self.limits = limits or PlaneLimits()
        self.report: PlaneReport | None = None
        """Plane that the writer chose; None before that."""
        self.is_closed = False
        self._is_choosing = True
        self._planes: dict[bytes, OpenPlane] = {}
        self._changed = threading.Condition()
        self._control: ControlConnection = connect(offer)
        self._answers: dict[str, Callable[[Message], None]] = {
            "hello": self._on_hello,
            "try": self._on_try,
            "probe": self._on_probe,
            "put": self._on_put,
            "use": self._on_use,
            "drop": self._on_drop,
            "floor": self._on_floor,
        }
        self._thread = threading.Thread(target=self._run, name="tensor-plane-reader", daemon=True)

    def start(self) -> None:
        """Answer the writer from now on."""
        self._thread.start()

    def wait_for_report(self, timeout_s: float) -> PlaneReport | None:
        """Plane that the writer chose; None if it did not choose within the time, or is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self.report is not None or self.is_closed, timeout_s)
            return self.report

    def has(self, plane_id: bytes) -> bool:
        """True if a plane is of this connection."""
        return plane_id in self._planes

    def read(self, reference: PlaneReference, out: torch.Tensor) -> None:
        """Fetch the bytes of a reference into ``out``, contiguous, and give their place back.

        ``StaleReferenceError`` when they are not there any more, were read before, or do not come in time; ``out`` is
        then undefined. On a GPU the copy is queued on the current stream.
        """
        plane = self._planes.get(reference.plane_id)
        if plane is None:
            raise StaleReferenceError("the plane of this tensor is closed")
        content = out.view(-1).view(torch.uint8)
        self._say_done(reference.plane_id, plane.read(reference, content, self.limits.transfer_s))

    def read_all(self, references: Sequence[PlaneReference]) -> list[torch.Tensor | None]:
        """The bytes of references, [num_bytes] uint8 each, on this end's device; what was placed together is fetched by
        one copy, of which they are views. None for one that cannot be read, of which ``read`` says why.
        """
        found: list[torch.Tensor | None] = [None] * len(references)
        by_plane: defaultdict[bytes, list[int]] = defaultdict(list)
        for index, reference in enumerate(references):
            by_plane[reference.plane_id].append(index)
        for plane_id, indices in by_plane.items():
            plane = self._planes.get(plane_id)
            if plane is None:
                continue
            own, done = plane.read_all([references[index] for index in indices], self.device, self.limits.transfer_s)
            self._say_done(plane_id, done)
            for index, content in zip(indices, own, strict=True):
                found[index] = content
        return found

    def read_rows(self, states: StateBatch, *, are_kept: bool = False) -> FetchedRows | None:
        """The states of many sessions on this end's device, fetched by one copy; None, and nothing read, where they
        cannot be read so. ``are_kept``: they can be read again.
        """
        plane = self._planes.get(states.plane_id)
        if plane is None:
            return None
        found, done = plane.read_rows(states, self.device, self.limits.transfer_s, are_kept=are_kept)
        self._say_done(states.plane_id, done)
        return found

    def close(self) -> None:
        """End the connection and free everything; idempotent."""
        self.is_closed = True
        self._control.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * self.limits.transfer_s)

    def _run(self) -> None:
        received_at = said_at = time.monotonic()
        beat_s = self.limits.silence_s / 10
        look_s = self.limits.silence_s / _CHECKS_PER_TIMEOUT
        try:
            while not self.is_closed:
                for message in self._control.receive(look_s):
                    received_at = time.monotonic()
                    self._answer(message)
                if time.monotonic() - received_at > self.limits.silence_s + self.limits.opening_s * self._is_choosing:
                    raise TimeoutError(f"nothing was received from it for {self.limits.silence_s:g} s")
                self._look_after_planes()
                if time.monotonic() - said_at > beat_s:
                    self._control.send({"type": "alive"})
                    said_at = time.monotonic()
        except OSError as error:
            if not self.is_closed:
                _log.info("the writer of this tensor plane is gone: %s", error)
        finally:
            self.close()
            with self._changed:
                planes, self._planes = self._planes, {}
                self._changed.notify_all()
            for plane in planes.values():
                plane.end.close()

    def _answer(self, message: Message) -> None:
        handler = self._answers.get(message["type"])
        if handler is None:
            return  # of a later version
        try:
            handler(message)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConnectionError(f"a message that cannot be read: {error}") from error

    def _look_after_planes(self) -> None:
        now = time.monotonic()
        for plane_id, plane in list(self._planes.items()):
            if plane.lock.acquire(blocking=False):
                done = plane.take_done()
                plane.lock.release()
                self._say_done(plane_id, done)
            trouble = plane.end.trouble(now, self.limits.transfer_s)
            if trouble is not None and not plane.is_reported:
                plane.is_reported = True
                self._control.send({"type": "broken", "plane": plane_id.hex(), "reason": trouble})

    def _say_done(self, plane_id: bytes, sequences: list[int]) -> None:
        if sequences:
            try:
                self._control.send({"type": "done", "plane": plane_id.hex(), "sequences": sequences})
            except OSError as error:
                _log.debug("the writer is gone: %s", error)  # the connection's thread sees it too

    def _on_hello(self, message: Message) -> None:
        self._is_choosing = True
        self._control.send({"type": "hello", "facts": PeerFacts.of(self.device).to_message()})

    def _on_try(self, message: Message) -> None:
        kind = PlaneKind(message["kind"])
        answer: Message = {"type": "opened"}
        try:
            end = open_reader(kind, message["details"], self.device, limits=self.limits)
            self._planes[bytes.fromhex(message["plane"])] = OpenPlane(kind, end)
        except OPENING_ERRORS as error:
            answer["reason"] = " ".join(str(error).split())[:200] or type(error).__name__
        self._control.send(answer)

    def _on_probe(self, message: Message) -> None:
        answer: Message = {"type": "probed"}
        num_bytes = int(message["bytes"])
        if not 0 < num_bytes <= self.limits.ring_bytes:
            raise ValueError(f"a probe of {num_bytes} bytes")
        out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        sequence = int(message["sequence"])
        try:
            end = self._planes[bytes.fromhex(message["plane"])].end
            end.wait(sequence, self.limits.opening_s)
            end.drop([sequence])
            end.read(out, 0)
            if (stream := current_stream(out.device)) is not None:
                stream.synchronize()
            if message["digest"]:
                answer["digest"] = hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()
        except (KeyError, OSError, RuntimeError, StaleReferenceError) as error:
            answer["reason"] = " ".join(str(error).split())[:200]
        self._control.send(answer)

    def _on_put(self, message: Message) -> None:
        plane = self._planes.get(bytes.fromhex(message["plane"]))
        if plane is not None:
            plane.end.announce(message)

    def _on_use(self, message: Message) -> None:
        reasons = tuple((str(kind), str(reason)) for kind, reason in message["reasons"])
        report = PlaneReport(PlaneKind(message["kind"]), float(message["ms"]), reasons)
        with self._changed:
            self.report, self._is_choosing = report, False
            self._changed.notify_all()

    def _on_drop(self, message: Message) -> None:
        plane = self._planes.pop(bytes.fromhex(message["plane"]), None)
        if plane is not None:
            plane.end.close()

    def _on_floor(self, message: Message) -> None:
        plane = self._planes.get(bytes.fromhex(message["plane"]))
        if plane is not None:
            plane.raise_floor(int(message["below"]))
        self._control.send(message)


class PlaneReaders:
    """All connections of one service that reads."""

    def __init__(self, device: torch.device, *, limits: PlaneLimits | None = None) -> None:
        self._device, self._limits = device, limits or PlaneLimits()
        self._readers: dict[bytes, PlaneReader] = {}
        self._lock = threading.Lock()
        # An interpreter that ends under a thread inside torch ends with an abort.
        atexit.register(self.close)

    def accept(self, offer: PlaneOffer) -> PlaneReader:
        """Connect to the writer that made an offer; ``UnavailableError`` when it cannot be reached."""
        reader = PlaneReader(offer, self._device, limits=self._limits)
        with self._lock:
            alive = {key: each for key, each in self._readers.items() if not each.is_closed}
            self._readers = {**alive, offer.offer_id: reader}
        reader.start()  # references come once it has answered
        return reader

    def read(self, reference: PlaneReference, out: torch.Tensor) -> None:
        """Fetch the bytes of a reference, whichever writer it is of; as ``PlaneReader.read``."""
        for reader in self._readers.values():
            if reader.has(reference.plane_id):
                reader.read(reference, out)
                return
        raise StaleReferenceError("the plane of this tensor is closed, or was never open here")

    def read_all(self, references: Sequence[PlaneReference]) -> list[torch.Tensor | None]:
        """The bytes of references, whichever writers they are of; as ``PlaneReader.read_all``."""
        found: list[torch.Tensor | None] = [None] * len(references)
        for reader in list(self._readers.values()):
            own = [index for index, reference in enumerate(references) if reader.has(reference.plane_id)]
            if own:
                for index, content in zip(own, reader.read_all([references[index] for index in own]), strict=True):
                    found[index] = content
        return found

    def read_rows(self, states: StateBatch, *, are_kept: bool = False) -> FetchedRows | None:
        """The states of many sessions, of whichever writer; as ``PlaneReader.read_rows``."""
        for reader in list(self._readers.values()):
            if reader.has(states.plane_id):
                return reader.read_rows(states, are_kept=are_kept)
        return None

    def close(self) -> None:
        """End all connections; idempotent."""
        atexit.unregister(self.close)
        for reader in self._readers.values():
            reader.close()
