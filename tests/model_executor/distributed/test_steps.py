"""A step arrives at another rank as it was sent, and says there what it says here."""

from __future__ import annotations

import dataclasses
import socket

import numpy as np
import pytest

from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.distributed.step_stream import StepReceiver, StepSender
from outrider.model_executor.steps import Operation, Step, batch_of, copies_of, copy_step, forward_step, no_numbers
from tests.model_executor.test_device_inputs import make_batch


def test_a_batch_is_read_back_from_its_step() -> None:
    batch = make_batch()
    found = batch_of(forward_step(batch, BatchShape.of(batch)))
    for field in dataclasses.fields(batch):
        assert getattr(found, field.name) == getattr(batch, field.name), field.name


def test_steps_arrive_whole_and_in_order_until_there_are_none() -> None:
    batch = make_batch()
    sent = [
        forward_step(batch, BatchShape.of(batch)),
        copy_step([(1, 2), (3, 4)]),
        Step(Operation.CAPTURE, (), no_numbers()),
        Step(77, tuple(range(12)), np.arange(100_000, dtype=np.int32)),
    ]
    here, there = socket.socketpair()
    here.settimeout(60)
    with here, there:
        receiver = StepReceiver(there, spin_s=0.001)
        for step in sent:
            if step.operation == 77:  # larger than what a socket holds
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            StepSender([here]).send(step)
            found = receiver.next()
            assert found is not None
            assert (found.operation, found.arguments) == (step.operation, step.arguments)
            np.testing.assert_array_equal(found.numbers, step.numbers, strict=True)
            if step.operation == Operation.COPY_PAGES:
                assert copies_of(found) == [(1, 2), (3, 4)]
        StepSender([here]).close()
        assert receiver.next() is None


def test_a_stream_that_breaks_off_is_an_error() -> None:
    here, there = socket.socketpair()
    with there:
        here.sendall(b"half")
        here.close()
        with pytest.raises(ConnectionError):
            StepReceiver(there, spin_s=0).next()
