"""A command arrives at another rank as it was sent, and says there what it says here."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np
import pytest

from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.distributed.command_stream import CommandReceiver, CommandSender
from outrider.model_executor.row_batch import RowBatch, plan_rows
from outrider.model_executor.worker_commands import (
    Operation,
    WorkerCommand,
    batch_of,
    capture_command,
    copies_of,
    copy_command,
    forward_command,
)
from tests.model_executor.test_device_inputs import make_batch, make_rows


def test_a_batch_is_read_back_from_its_command() -> None:
    (table, rows), batch = make_rows(), make_batch()
    layout = plan_rows(table, RowBatch.of(rows))
    found = batch_of(forward_command(layout, BatchShape.of(batch)))
    for field in dataclasses.fields(batch):
        assert getattr(found, field.name) == getattr(batch, field.name), field.name


def test_commands_arrive_whole_and_in_order_until_there_are_none() -> None:
    table, rows = make_rows()
    layout = plan_rows(table, RowBatch.of(rows))
    sent = [
        forward_command(layout, layout.pattern.shape),
        forward_command(layout, layout.pattern.shape, is_drawn=True),
        copy_command([(1, 2), (3, 4)]),
        capture_command(),
        WorkerCommand(77, tuple(range(12)), np.arange(100_000, dtype=np.int32)),
    ]
    here, there = socket.socketpair()
    here.settimeout(60)
    with here, there:
        receiver = CommandReceiver(there, spin_s=0.001)
        for command in sent:
            if command.operation == 77:  # larger than what a socket holds
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            CommandSender([here]).send(command)
            found = receiver.next()
            assert found is not None
            assert (found.operation, found.arguments) == (command.operation, command.arguments)
            np.testing.assert_array_equal(found.numbers, command.numbers, strict=True)
            if command.operation == Operation.COPY_PAGES:
                assert copies_of(found) == [(1, 2), (3, 4)]
        CommandSender([here]).close()
        assert receiver.next() is None


def test_while_the_device_computes_a_command_is_looked_for_without_sleeping() -> None:
    here, there = socket.socketpair()
    answers = iter([True, True, False])

    def is_busy() -> bool:
        if not (answer := next(answers)):
            CommandSender([here]).send(capture_command())
        return answer

    with here, there:
        found = CommandReceiver(there, spin_s=60).next(is_busy)
    assert found is not None
    assert found.operation == Operation.CAPTURE
    assert next(answers, None) is None


def test_a_stream_that_breaks_off_is_an_error() -> None:
    here, there = socket.socketpair()
    with there:
        here.sendall(b"half")
        here.close()
        with pytest.raises(ConnectionError):
            CommandReceiver(there, spin_s=0).next()
