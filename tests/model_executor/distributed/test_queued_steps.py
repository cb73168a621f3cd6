"""A follower queues commands in the order in which they come, and counts a step when its device has done it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from outrider.model_executor.distributed.runner import run_commands
from outrider.model_executor.worker_commands import Operation, WorkerCommand, copy_command, no_numbers


class Device:
    """A worker whose device does nothing until it is told to."""

    def __init__(self) -> None:
        self.queued: list[WorkerCommand] = []
        self.num_done = 0

    def run(self, command: WorkerCommand) -> None:
        self.queued.append(command)

    def mark(self) -> Any:
        place = len(self.queued)
        return SimpleNamespace(is_reached=lambda: self.num_done >= place)

    def wait(self) -> None:
        self.num_done = len(self.queued)


class Follower:
    """Gives one command after the other; between them the device does what ``paces`` says."""

    def __init__(self, commands: list[WorkerCommand], device: Device, paces: list[int]) -> None:
        self.heartbeats = SimpleNamespace(num_finished=0)
        self.seen: list[tuple[int, int, bool]] = []
        """Commands queued, steps counted and whether the device has more to do, before each command."""
        self._commands, self._device, self._paces = iter(commands), device, iter(paces)

    def next_command(self, is_busy: Callable[[], bool]) -> WorkerCommand | None:
        self._device.num_done += next(self._paces)
        busy = is_busy()
        self.seen.append((len(self._device.queued), self.heartbeats.num_finished, busy))
        return next(self._commands, None)


def forward(operation: Operation, number: int) -> WorkerCommand:
    return WorkerCommand(operation, (number,), no_numbers())


def test_commands_are_queued_in_order_and_counted_when_they_are_done() -> None:
    commands = [
        forward(Operation.FORWARD, 0),
        forward(Operation.FORWARD_DRAWN, 1),
        copy_command([(1, 2)]),
        forward(Operation.FORWARD_DRAWN, 2),
        forward(Operation.DRAFT, 3),
    ]
    device = Device()
    follower: Any = Follower(commands, device, [0, 0, 0, 2, 0, 3])
    run_commands(follower, device)  # type: ignore[arg-type]
    assert device.queued == commands
    # The second forward is queued while the first runs. Copies of pages are not steps.
    assert follower.seen == [(0, 0, False), (1, 0, True), (2, 0, True), (3, 2, False), (4, 2, True), (5, 4, False)]
