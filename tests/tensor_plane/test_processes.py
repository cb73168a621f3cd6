"""Tensors between processes, either of which is killed or stopped in the middle of a transfer.

No end waits past its deadline, the other process lives and takes the next peer, nothing is left behind.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind
from outrider.tensor_plane.reader import PlaneReaders
from outrider.tensor_plane.writer import PlaneWriter, PlaneWriters
from tests.tensor_plane.peers import (
    CPU,
    LIMITS,
    OPENING_S,
    answer,
    digest,
    holdings,
    impatient,
    kill,
    process,
    read_on_demand,
    write_forever,
)
from tests.tensor_plane.test_planes import KINDS, assert_soon

NUM_BYTES = 3 << 20
"""Some milliseconds of gloo: most kills hit a transfer."""
NUM_KILLS = [
    pytest.param(3, id="short"),
    pytest.param(100, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_bytes_arrive_in_another_process(kind: PlaneKind) -> None:
    writers = PlaneWriters(CPU, kinds=(kind,), limits=LIMITS)
    with process(read_on_demand, LIMITS) as (_, pipe):
        offer = writers.offer()
        pipe.send(offer)
        assert answer(pipe).kind == kind
        writer = writers.writer(offer.offer_id)
        assert writer is not None
        for num_rows in (1, 6, 64, 500):
            rows = torch.randn(num_rows, 1024).bfloat16()
            references = writer.put(rows, [num_rows])
            assert references is not None
            pipe.send(references[0])
            assert answer(pipe) == digest(rows)
    writers.close()


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_is_killed_in_the_middle(kind: PlaneKind, num_kills: int) -> None:
    draw = random.Random(num_kills)
    writers = PlaneWriters(CPU, kinds=(kind,), limits=LIMITS)
    rows = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
    before = (0, 0, 0)
    for number in range(num_kills):
        with process(read_on_demand, LIMITS) as (child, pipe):
            offer = writers.offer()
            pipe.send(offer)
            assert answer(pipe).kind == kind
            writer = writers.writer(offer.offer_id)
            assert writer is not None
            _write_for(writer, rows, draw.uniform(0, 0.02))
            kill(child)
            began = time.monotonic()
            while not writer.is_closed:
                writer.put(rows, [NUM_BYTES])  # what is put into the void harms nobody
                assert time.monotonic() - began < LIMITS.silence_s + LIMITS.transfer_s
                time.sleep(0.001)
            assert writer.put(rows, [NUM_BYTES]) is None
        before = _check_nothing_grows(number, before)
    writers.close()


def _write_for(writer: PlaneWriter, rows: torch.Tensor, seconds: float) -> None:
    until = time.monotonic() + seconds
    assert writer.put(rows, [NUM_BYTES]) is not None
    while time.monotonic() < until:
        writer.put(rows, [NUM_BYTES])


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_is_killed_in_the_middle(kind: PlaneKind, num_kills: int) -> None:
    draw = random.Random(num_kills)
    readers = PlaneReaders(CPU, limits=LIMITS)
    before = (0, 0, 0)
    for number in range(num_kills):
        with process(write_forever, kind, LIMITS, NUM_BYTES) as (child, pipe):
            reader = readers.accept(answer(pipe))
            report = reader.wait_for_report(OPENING_S)
            assert report is not None
            assert report.kind == kind
            num_read = _read_until_killed(readers, pipe, child, draw.randint(1, 8))
            assert num_read
            assert_soon(partial(getattr, reader, "is_closed"), LIMITS.silence_s)
        before = _check_nothing_grows(number, before)
    readers.close()


def _read_until_killed(readers: PlaneReaders, pipe: Connection, child: BaseProcess, num_reads: int) -> int:
    """Read what the writer puts; kill it after so many; what is read after that is right or stale, and never late."""
    out = torch.empty(NUM_BYTES, dtype=torch.uint8)
    num_right = 0
    while True:
        try:
            reference, expected = answer(pipe)
        except (EOFError, OSError):
            return num_right
        if num_right == num_reads:
            kill(child)
        began = time.monotonic()
        try:
            readers.read(reference, out)
            assert digest(out) == expected
            num_right += 1
        except StaleReferenceError:
            assert num_right >= num_reads
        assert time.monotonic() - began < LIMITS.transfer_s + 2


def _check_nothing_grows(number: int, before: tuple[int, int, int]) -> tuple[int, int, int]:
    """Compare with what was held after the second kill; memory on the long run."""
    if number < 2:
        assert_soon(lambda: holdings()[2] == 0)
        return holdings()
    gc.collect()
    assert_soon(lambda: all(now <= then for now, then in zip(holdings(), before, strict=True)))
    return before


@pytest.mark.slow
def test_memory_does_not_grow_with_peers_that_come_and_go() -> None:
    peaks = []
    for _ in range(25):
        writers, readers = PlaneWriters(CPU, limits=LIMITS), PlaneReaders(CPU, limits=LIMITS)
        reader = readers.accept(writers.offer())
        assert reader.wait_for_report(OPENING_S) is not None
        readers.close()
        writers.close()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[9] < 20_000  # kB; a ring has 8,192


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_hangs_is_noticed_outside_and_another_is_served(kind: PlaneKind) -> None:
    limits = impatient(silence_s=4.0, transfer_s=2.0)
    writers = PlaneWriters(CPU, kinds=(kind,), limits=limits)
    rows = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    with process(read_on_demand, limits) as (hung, pipe), process(read_on_demand, LIMITS) as (_, other_pipe):
        offer = writers.offer()
        pipe.send(offer)
        answer(pipe)
        writer = writers.writer(offer.offer_id)
        assert writer is not None
        assert hung.pid is not None
        os.kill(hung.pid, signal.SIGSTOP)
        began = time.monotonic()
        longest = 0.0
        while not writer.is_closed:
            asked = time.monotonic()
            writer.put(rows, [NUM_BYTES])
            longest = max(longest, time.monotonic() - asked)
            assert asked - began < OPENING_S
            time.sleep(0.01)
        assert longest < 30  # no put waits for a peer that hangs, beyond the end of a plane
        offer = writers.offer()
        other_pipe.send(offer)
        assert answer(other_pipe).kind == kind
        fresh = writers.writer(offer.offer_id)
        assert fresh is not None
        references = fresh.put(rows, [NUM_BYTES])
        assert references is not None
        other_pipe.send(references[0])
        assert answer(other_pipe) == digest(rows)
        os.kill(hung.pid, signal.SIGCONT)
    writers.close()
    assert_soon(lambda: holdings()[2] == 0)
