"""Point to point over ``torch.distributed`` as a plane: NCCL between GPUs, gloo through main memory.

The writer keeps a ring like the reader's, from which a helper thread sends. The reader's helper thread receives each
announced transfer into its own ring. No thread that others wait for is inside a collective, so a transfer that hangs
is noticed outside, and the communicator is aborted.
"""

from __future__ import annotations

import datetime
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import TCPStore

from outrider.planes import PlaneKind
from outrider.tensor_plane.arrivals import ArrivedTensors
from outrider.tensor_plane.communicator import READER, WRITER, PlaneCommunicator
from outrider.tensor_plane.control import Message
from outrider.tensor_plane.endpoints import Details, PlaneLimits, ReaderEnd, WriterEnd, recorded_event


@dataclass(slots=True)
class _Transfer:
    begin: int
    end: int
    sequences: list[int]
    ready: torch.cuda.Event | None = None


class _Helper:
    """A thread inside the communicator, and what is seen of it from outside.

    Only the thread refers to ``work``, which refers to the end: a plane's end is freed when it is closed, with its
    ring, its store's thread and their descriptors, and not when cycles are next collected.
    """

    def __init__(self, name: str, work: Callable[[_Transfer], None]) -> None:
        self._waiting: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._began: float | None = None
        self._trouble: str | None = None
        self._is_idle = threading.Condition()
        self._num_left = 0
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def put(self, transfer: _Transfer) -> None:
        with self._is_idle:
            self._num_left += 1
        self._waiting.put(transfer)

    def wait_until_idle(self, deadline_s: float) -> None:
        """Return when all transfers are done or have failed."""
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._num_left or self._trouble is not None, deadline_s)

    def trouble(self, now: float, deadline_s: float) -> str | None:
        began = self._began
        if self._trouble is None and began is not None and now - began > deadline_s:
            return f"a transfer takes longer than {deadline_s:g} s"
        return self._trouble

    def stop(self) -> None:
        """Let the thread end after the transfer it is in."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self, work: Callable[[_Transfer], None]) -> None:
        while (transfer := self._waiting.get()) is not None:
            self._began = time.monotonic()
            try:
                work(transfer)
            except (RuntimeError, OSError) as error:
                self._trouble = " ".join(str(error).split())[:200] or type(error).__name__
            self._began = None
            with self._is_idle:
                self._num_left -= 1
                self._is_idle.notify_all()
            if self._trouble is not None:
                return


class ProcessGroupWriter(WriterEnd):
    """The sending end, which serves the store."""

    def __init__(
        self,
        kind: PlaneKind,
        capacity: int,
        device: torch.device,
        *,
        host: str,
        limits: PlaneLimits,
        announce: Callable[[Message], None],
    ) -> None:
        """``announce`` sends a message to the reader, before each transfer."""
        self.capacity = capacity
        self._kind, self._device, self._host, self._limits = kind, device, host, limits
        self._announce = announce
        self._meeting = secrets.token_hex(16)
        self._ring = _make_ring(kind, capacity, device)
        # Bound here, since a store that is given a port listens on every interface.
        listener = socket.create_server((host, 0))
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            self._port,
            is_master=True,
            timeout=datetime.timedelta(seconds=limits.opening_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._communicator: PlaneCommunicator | None = None
        self._helper = _Helper("tensor-plane-send", self._send)

    def details(self) -> Details:
        """Address of the store, and a secret for its reader alone: any process on the network may ask the store."""
        return {"host": self._host, "port": self._port, "capacity": self.capacity, "meeting": self._meeting}

    def connect(self) -> None:
        """Form the group with a reader that does the same now."""
        self._communicator = PlaneCommunicator(
            self._kind, WRITER, self._store, self._device, self._limits, meeting=self._meeting
        )

    def write(self, content: torch.Tensor, offset: int, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Copy into the ring, from which the helper sends."""
        end = offset + content.numel()
        self._ring[offset:end].copy_(content, non_blocking=True)
        self._helper.put(_Transfer(offset, end, list(sequences), recorded_event(content.device)))

    def synchronize(self) -> None:
        """Wait for the helper."""
        self._helper.wait_until_idle(self._limits.opening_s)

    def trouble(self, now: float, deadline_s: float) -> str | None:
        """Error of the helper process, if it failed."""
        return self._helper.trouble(now, deadline_s)

    def close(self) -> None:
        """Abort."""
        self._helper.stop()
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator = None
        self._helper.join(self._limits.transfer_s)

    def _send(self, transfer: _Transfer) -> None:
        communicator = self._communicator
        if communicator is None:
            raise ConnectionError("the plane is closed")
        self._announce({"type": "put", "begin": transfer.begin, "end": transfer.end, "of": transfer.sequences})
        communicator.send(self._ring[transfer.begin : transfer.end], transfer.ready)


class ProcessGroupReader(ReaderEnd):
    """The receiving end."""

    def __init__(self, kind: PlaneKind, details: Details, device: torch.device, *, limits: PlaneLimits) -> None:
        """Form the group; ``RuntimeError`` when the writer is not there in time."""
        self._limits = limits
        self.capacity = int(details["capacity"])
        if not 0 < self.capacity <= max(limits.ring_bytes, limits.device_ring_bytes):
            raise ValueError(f"a ring of {self.capacity} bytes")
        store = TCPStore(
            str(details["host"]), int(details["port"]), timeout=datetime.timedelta(seconds=limits.opening_s)
        )
        self._ring = _make_ring(kind, self.capacity, device)
        communicator = PlaneCommunicator(kind, READER, store, device, limits, meeting=str(details["meeting"]))
        self._communicator: PlaneCommunicator | None = communicator
        self._arrivals = ArrivedTensors(communicator.has_ended if kind is PlaneKind.NCCL else None)
        self._helper = _Helper("tensor-plane-receive", self._receive)

    def announce(self, message: Message) -> None:
        """Receive what the writer is about to send."""
        begin, end, sequences = int(message["begin"]), int(message["end"]), [int(one) for one in message["of"]]
        if not 0 <= begin < end <= self._ring.numel():
            raise ConnectionError(f"bytes {begin} to {end} of a ring of {self._ring.numel()}")
        self._helper.put(_Transfer(begin, end, sequences))

    def wait(self, sequence: int, deadline_s: float) -> None:
        """Wait until the helper, or the card, says that the bytes are there."""
        self._arrivals.wait(sequence, deadline_s, lambda: self._why_nothing_comes(deadline_s))

    def drop(self, sequences: Sequence[int]) -> None:
        """Drop transfers that are not waited for any more."""
        self._arrivals.drop(sequences)

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy out of the ring."""
        out.copy_(self._ring[offset : offset + out.numel()], non_blocking=True)

    def raise_floor(self, floor: int) -> None:
        """Forget what no reader needs any more."""
        self._arrivals.raise_floor(floor)

    def trouble(self, now: float, deadline_s: float) -> str | None:
        """Error of the helper process, if it failed."""
        return self._helper.trouble(now, deadline_s)

    def close(self) -> None:
        """Abort."""
        self._helper.stop()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()
        self._arrivals.wake()
        self._helper.join(self._limits.transfer_s)

    def _why_nothing_comes(self, deadline_s: float) -> str | None:
        trouble = self._helper.trouble(time.monotonic(), deadline_s)
        return trouble or (None if self._communicator is not None else "the plane is closed")

    def _receive(self, transfer: _Transfer) -> None:
        communicator = self._communicator
        try:
            if communicator is None:
                raise ConnectionError("the plane is closed")
            content = self._ring[transfer.begin : transfer.end]
            communicator.receive(content, lambda event: self._arrivals.note_queued(transfer.sequences, event))
            self._arrivals.note_arrived(transfer.sequences)
        finally:
            self._arrivals.wake()


def _make_ring(kind: PlaneKind, capacity: int, device: torch.device) -> torch.Tensor:
    if kind is PlaneKind.NCCL:
        return torch.empty(capacity, dtype=torch.uint8, device=device)
    return torch.empty(capacity, dtype=torch.uint8, pin_memory=device.type == "cuda")
