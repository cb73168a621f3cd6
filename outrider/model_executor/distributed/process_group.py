"""The processes that share a model: how they find each other, stay together, and end together.

Owns the order: rank 0 starts the others unless torchrun did, all meet, all watch each other, then torch's own group is
formed, whose collectives would wait forever for a rank that is gone. One group a process, as torch has it. Refuses to
know models and steps' meanings.
"""

from __future__ import annotations

import abc
import datetime
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from outrider.errors import UnavailableError
from outrider.model_executor.distributed.command_stream import CommandReceiver, CommandSender
from outrider.model_executor.distributed.communicator import Communicator
from outrider.model_executor.distributed.device_communicators import CpuCommunicator, open_gpu_communicator
from outrider.model_executor.distributed.heartbeats import ENDED, Heartbeats
from outrider.model_executor.distributed.local_ranks import LocalRanks
from outrider.model_executor.distributed.rank_connections import Purpose, RankListener, RankZeroAddress, connect
from outrider.model_executor.distributed.rank_info import RankInfo, hold_lifeline
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.worker_commands import Operation, WorkerCommand

_log = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_RENDEZVOUS_KEY = "outrider/rendezvous"
_RENDEZVOUS_TIMEOUT_S = 300.0
"""Longest wait for all ranks to start, which import torch and open their devices first."""
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast between GPUs gains nothing for sums this small, and not every host bears it."""
_END_WITHIN_S = 10.0
_FAILURE_GRACE_S = 2.0
"""Time in which a service whose rank is lost may tell its users before its process ends regardless."""
_EXIT_STATUS_TIMEOUT_S = 0.5
"""Longest wait for the exit status of a rank whose connection has ended."""
_SPIN_S = 0.005
_STDERR = 2

OnFailure = Callable[[BaseException], None]


class Member(abc.ABC):
    """Operations common to all ranks."""

    def __init__(self, place: RankInfo, *, one_shot: bool) -> None:
        self.place = place
        self._one_shot = one_shot

    @abc.abstractmethod
    def wait_for_loss(self, error: BaseException) -> None:
        """A collective failed. Return only when it is clear that this is not because a rank is lost."""

    def open_communicator(self, device: torch.device, dtype: torch.dtype) -> Communicator:
        """Open the communicator of the ranks; every rank calls it at the same point."""
        shard = Shard(self.place.rank, self.place.size)
        if device.type == "cuda":
            return open_gpu_communicator(shard, device, dtype, one_shot=self._one_shot)
        return CpuCommunicator(shard, self.wait_for_loss)

    def least(self, value: int) -> int:
        """The least of what the ranks say; every rank calls it at the same point."""
        answer = torch.tensor([value])
        try:
            dist.all_reduce(answer, dist.ReduceOp.MIN)
        except RuntimeError as error:
            self.wait_for_loss(error)
            raise
        return int(answer.item())


class Leader(Member):
    """Rank 0. ``on_failure`` is called, from a thread, when another rank is lost; the process ends soon after."""

    def __init__(
        self,
        place: RankInfo,
        device: torch.device,
        command: Sequence[str],
        on_failure: OnFailure | None,
        *,
        one_shot: bool = True,
    ) -> None:
        super().__init__(place, one_shot=one_shot)
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._exits: dict[int, str] = {}
        self._has_ended = False
        self._local: LocalRanks | None = None
        listener = RankListener(os.environ["MASTER_ADDR"] if place.is_started else _HERE)
        store: Store
        if place.is_started:
            store = _given_store(place)
        else:
            store = own = TCPStore(_HERE, 0, place.size, is_master=True, wait_for_workers=False)
            self._local = LocalRanks(command, place.size, own.port, self._note_exit)
        store.set(_RENDEZVOUS_KEY, listener.address.encode())
        try:
            sockets = listener.accept(place.size, _RENDEZVOUS_TIMEOUT_S, self._check_starting)
        except BaseException:
            self._kill()
            raise
        self._sender = CommandSender([sockets[rank, Purpose.COMMANDS] for rank in range(1, place.size)])
        self._heartbeats = Heartbeats(
            {rank: sockets[rank, Purpose.HEARTBEATS] for rank in range(1, place.size)}, self._lose
        )
        form_group(store, place, device)

    def abandon(self) -> None:
        """End the others at once, for this rank cannot go on."""
        self._heartbeats.stop()
        self._kill()
        self.close()

    def process_ids(self) -> dict[int, int]:
        """Process ids of the ranks that this one started."""
        return {} if self._local is None else self._local.process_ids()

    def publish(self, command: WorkerCommand) -> None:
        """Tell the others a command; rank 0 runs it too, right after."""
        if command.operation != Operation.COPY_PAGES:
            self._heartbeats.num_expected += 1
        try:
            self._sender.send(command)
        except OSError as error:
            self.wait_for_loss(error)
            raise UnavailableError(f"a rank cannot be reached: {error}") from error

    def wait_for_loss(self, error: BaseException) -> None:
        """The process ends when a rank is lost, so that this does not return."""
        if self._lost.wait(_END_WITHIN_S):
            threading.Event().wait()
        _log.error("all ranks are connected, but the group failed: %s", error)

    def close(self) -> None:
        """End the others, and wait until those that were started here have ended. Idempotent."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._heartbeats.stop()
        self._sender.close()
        if self._local is not None:
            self._local.join(_END_WITHIN_S)
        if dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def _check_starting(self) -> None:
        for rank, how in self._exits.items():
            raise UnavailableError(f"rank {rank} of {self.place.size} {how} while it was starting")

    def _note_exit(self, rank: int, how: str) -> None:
        self._exits[rank] = how

    def _lose(self, rank: int, what: str) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        what = self._how_it_ended(rank) if what == ENDED else what
        reason = f"rank {rank} of {self.place.size} {what}"
        _log.error("%s; the service ends with it", reason)
        self._lost.set()
        self._kill()
        if self._on_failure is not None:
            self._on_failure(UnavailableError(reason))
            time.sleep(_FAILURE_GRACE_S)
        os._exit(1)  # a thread in a collective would wait forever

    def _how_it_ended(self, rank: int) -> str:
        until = time.monotonic() + _EXIT_STATUS_TIMEOUT_S
        while self._local is not None and rank not in self._exits and time.monotonic() < until:
            time.sleep(0.01)
        return self._exits.get(rank, "has ended")

    def _kill(self) -> None:
        if self._local is not None:
            self._local.kill()
            self._local.join(_END_WITHIN_S)


class Follower(Member):
    """Any other rank. Its process ends when rank 0 is lost."""

    def __init__(self, place: RankInfo, device: torch.device, *, one_shot: bool = True) -> None:
        super().__init__(place, one_shot=one_shot)
        if place.has_lifeline:
            hold_lifeline(self._end)
        store = _given_store(place)
        address = RankZeroAddress.decode(store.get(_RENDEZVOUS_KEY))
        steps, beats = (connect(address, place.rank, purpose, _RENDEZVOUS_TIMEOUT_S) for purpose in Purpose)
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 drains, then ends the others
            signal.signal(number, signal.SIG_IGN)
        self._receiver = CommandReceiver(steps, spin_s=_SPIN_S if device.type == "cuda" else 0.0)
        self.heartbeats = Heartbeats({0: beats}, lambda rank, what: self._end())
        form_group(store, place, device)

    publish = None
    """None: rank 0 alone publishes commands."""

    def next_command(self, is_busy: Callable[[], bool]) -> WorkerCommand | None:
        """The next command of rank 0; None at the end. ``is_busy`` as in ``CommandReceiver.next``."""
        try:
            return self._receiver.next(is_busy)
        except OSError:
            self._end()

    def wait_for_loss(self, error: BaseException) -> None:
        """A collective failed: another rank is gone, and rank 0 ends with it, or is the one that is gone."""
        time.sleep(_END_WITHIN_S)
        _log.error("all ranks are connected, but the group failed: %s", error)

    def close(self) -> None:
        """Leave, when rank 0 said that nothing comes any more."""
        self.heartbeats.stop()
        if dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def _end(self) -> NoReturn:
        faulthandler.dump_traceback(file=_STDERR)  # it may be this rank that hung
        _log.error("rank 0 is gone; rank %d of %d ends with it", self.place.rank, self.place.size)
        os._exit(1)


def form_group(store: Store, place: RankInfo, device: torch.device) -> None:
    """Torch's own group; ``UnavailableError`` when this process is in one already."""
    if dist.is_initialized():
        raise UnavailableError("this process shares a model with others already: one group a process")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        for name, off in _NO_MULTICAST.items():
            os.environ.setdefault(name, off)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("torch", store),
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=_RENDEZVOUS_TIMEOUT_S),
    )


def _given_store(place: RankInfo) -> Store:
    found = rendezvous("env://", place.rank, place.size, timeout=datetime.timedelta(seconds=_RENDEZVOUS_TIMEOUT_S))
    store: Store = next(found)[0]
    return store
