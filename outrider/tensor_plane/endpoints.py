"""The two ends of one plane: what each kind of plane implements, and which kinds two processes can use at all.

A ring is bytes, [R] uint8 on the writer's or the reader's device. An end moves bytes and nothing else: places, sequence
numbers and deadlines are its caller's.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outrider.boot_id import boot_id
from outrider.planes import PlaneKind
from outrider.tensor_plane.control import Message


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Limits of one connection; both ends have the same defaults."""

    ring_bytes: int = 64 << 20
    """Bytes of a ring in main memory."""
    device_ring_bytes: int = 256 << 20
    """Bytes of a ring on a GPU: the parts of prompts' states that may be under way, 192 MiB, and those of the steps."""
    transfer_s: float = 3.0
    """Longest time of a transfer, and of waiting for one."""
    opening_s: float = 20.0
    """Longest time of opening one plane and sending its probes."""
    silence_s: float = 5.0
    """Time without any message after which the peer is gone; heartbeats are ten times as frequent."""
    unread_s: float = 10.0
    """Seconds after which a tensor that was not fetched is given up."""


Details = dict[str, Any]
"""Parameters of the reader's end; JSON."""


class WriterEnd(abc.ABC):
    """Puts bytes where the reader finds them. Called by one thread at a time."""

    capacity: int
    """Bytes of the ring."""

    @abc.abstractmethod
    def details(self) -> Details:
        """Details that the reader needs to open the plane."""

    def connect(self) -> None:  # noqa: B027 - most planes have nothing to do here
        """Meet a reader that is opening its end now; ``OSError`` or ``RuntimeError`` when that fails."""

    def opened(self) -> None:  # noqa: B027
        """The reader has opened its end, or has failed to."""

    @abc.abstractmethod
    def write(self, content: torch.Tensor, offset: int, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Bring ``content`` [N] uint8 to a place of the ring, in the order of the current stream.

        ``sequences`` says which bytes [begin, end) of the ring each use has. Returns before the bytes are there.
        """

    def synchronize(self) -> None:  # noqa: B027
        """Return when everything written so far may be read."""

    def trouble(self, now: float, deadline_s: float) -> str | None:
        """Reason why this end is of no use any more; None while it works. May be called from any thread."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give up transfers under way and free everything. Idempotent.

        Waits for a transfer to end, no longer than one may take.
        """


class ReaderEnd(abc.ABC):
    """Fetches bytes. Called by one thread at a time."""

    capacity: int
    """Bytes of the ring."""
    widest_gap_bytes = 0
    """Bytes between two places that are copied with them rather than left out by a second copy."""

    def announce(self, message: Message) -> None:  # noqa: B027
        """Bytes are on their way (planes whose writer pushes)."""

    def wait(self, sequence: int, deadline_s: float) -> None:  # noqa: B027
        """Return when the bytes of a use are there; ``StaleReferenceError`` when they do not come within the deadline.

        Only for planes whose writer pushes: elsewhere bytes are there before the reader is notified.
        """

    def drop(self, sequences: Sequence[int]) -> None:  # noqa: B027
        """Drop uses that were read."""

    @abc.abstractmethod
    def read(self, out: torch.Tensor, offset: int) -> None:
        """Copy bytes of the ring to ``out`` [N] uint8, in the order of the current stream; behind that the place may be
        given back.
        """

    def raise_floor(self, floor: int) -> None:  # noqa: B027
        """Declare that tensors with lower sequence numbers are not read any more."""

    def trouble(self, now: float, deadline_s: float) -> str | None:
        """Reason why this end is of no use any more; None while it works."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give up transfers under way and free everything. Idempotent."""


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Facts about one process, from which both sides derive the possible planes."""

    host_id: str
    """Tells its host from all others."""
    device_type: str
    device_id: str
    """The GPU's UUID; empty on a CPU."""
    torch_version: str

    @classmethod
    def of(cls, device: torch.device) -> PeerFacts:
        """Facts about this process."""
        is_gpu = device.type == "cuda"
        device_id = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
        return cls(boot_id() or socket.gethostname(), device.type, device_id, torch.__version__)

    @classmethod
    def from_message(cls, message: Message) -> PeerFacts:
        """Facts as received; ``ConnectionError`` where something is missing."""
        try:
            return cls(**{name: str(message["facts"][name]) for name in cls.__slots__})
        except (KeyError, TypeError) as error:
            raise ConnectionError("the reader does not say what it is") from error

    def to_message(self) -> Details:
        """Message to send."""
        return asdict(self)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which this thread queues work; None on a CPU, where nothing is queued."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def same_or_current_stream(stream: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream | None:
    """``current_stream``, or ``stream`` if it is that one: making the object takes as long as queueing a copy."""
    if stream is None or device.type != "cuda" or stream.device != device:
        return current_stream(device)
    is_same = torch._C._cuda_getCurrentRawStream(device.index) == stream.cuda_stream
    return stream if is_same else current_stream(device)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind what the current stream has; None on a CPU, where nothing is queued."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def why_not(kind: PlaneKind, writer: PeerFacts, reader: PeerFacts) -> str:
    """Reason why two processes cannot use a kind of plane, known without trying; empty if they may."""
    both_on_gpus = writer.device_type == reader.device_type == "cuda"
    if kind is PlaneKind.GLOO:
        return ""
    if kind is PlaneKind.NCCL:
        if not both_on_gpus:
            return "one side has no GPU"
        if writer.device_id == reader.device_id:
            return "both are on one GPU"
        return "" if writer.torch_version == reader.torch_version else "the versions of torch differ"
    if writer.host_id != reader.host_id:
        return "they are on different hosts"
    return "one side has no GPU" if kind is PlaneKind.CUDA_IPC and not both_on_gpus else ""
