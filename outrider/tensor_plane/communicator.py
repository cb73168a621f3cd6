"""A communicator of two processes: NCCL between GPUs, gloo through main memory.

It is apart from the group that shares a model: own store, own stream. NCCL's watchdog, which would end the process when
a transfer hangs, is off for it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from outrider.planes import PlaneKind
from outrider.tensor_plane.endpoints import PlaneLimits

WRITER, READER = 0, 1
"""Ranks."""
_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",
}


class PlaneCommunicator:
    """Two processes. ``transfer`` blocks its thread until the bytes are across, at most for the deadline."""

    def __init__(
        self, kind: PlaneKind, rank: int, store: TCPStore, device: torch.device, limits: PlaneLimits, *, meeting: str
    ) -> None:
        """``meeting``: name under which both find each other in the store, which only they know."""
        self._limits = limits
        self._is_aborted = False
        self.device = device if kind is PlaneKind.NCCL else torch.device("cpu")
        self._stream: Any = _stream(kind, device)
        self._store = store
        self._group = _open_group(kind, rank, PrefixStore(f"tensor-plane/{meeting}", store), limits)

    def send(self, content: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        """Send when ``ready``; ``RuntimeError`` when it does not get through."""
        self._transfer(lambda: self._group.send([content], READER, 0), ready)

    def receive(self, content: torch.Tensor, on_queued: Callable[[torch.cuda.Event], None]) -> None:
        """Receive; ``RuntimeError`` when nothing comes. ``on_queued`` is told of the event behind the transfer, once
        that is queued, where a GPU receives.
        """
        self._transfer(lambda: self._group.recv([content], WRITER, 0), None, on_queued)

    def has_ended(self, event: torch.cuda.Event) -> bool:
        """True if the transfer before an event is done; not if it was given up, which lets its event pass too."""
        return bool(event.query()) and not self._is_aborted  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """Give up what is under way; a thread inside it comes back, by its deadline at the latest."""
        self._is_aborted = True
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _transfer(
        self,
        start: Callable[[], Any],
        ready: torch.cuda.Event | None,
        on_queued: Callable[[torch.cuda.Event], None] | None = None,
    ) -> None:
        if self._stream is None:
            if ready is not None:
                ready.synchronize()
            start().wait(datetime.timedelta(seconds=self._limits.transfer_s))
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            start().wait()  # orders the stream, not the thread
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        if on_queued is not None:
            on_queued(done)
        done.synchronize()  # which ``abort`` ends too
        if self._is_aborted:
            raise RuntimeError("the transfer was given up")


def _stream(kind: PlaneKind, device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if kind is PlaneKind.NCCL else None  # type: ignore[no-untyped-call]


def _open_group(kind: PlaneKind, rank: int, store: PrefixStore, limits: PlaneLimits) -> Any:  # noqa: ANN401 - no types
    timeout = datetime.timedelta(seconds=limits.opening_s)
    if kind is PlaneKind.NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(_WATCHDOG_OFF):
            return dist.ProcessGroupNCCL(store, rank, 2, options)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(store))]
    options._timeout = timeout
    options._threads = 1
    return gloo(store, rank, 2, options)


def _own_address(store: PrefixStore) -> str:
    """The address of this host that the other end reaches: the one from which the store is reached."""
    underlying: Any = store.underlying_store
    with socket.socket(socket.AF_INET6 if ":" in underlying.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((underlying.host, underlying.port))
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that are read while a communicator is made; those of others stay as they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
