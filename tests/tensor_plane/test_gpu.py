"""Planes between GPUs: CUDA IPC on one card and to a peer, NCCL over two; either side killed, the other unharmed."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch

from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind
from outrider.tensor_plane.reader import PlaneReaders
from outrider.tensor_plane.writer import AUTOMATIC, PlaneWriter, PlaneWriters
from tests.tensor_plane.peers import (
    LIMITS,
    OPENING_S,
    answer,
    digest,
    impatient,
    kill,
    process,
    read_on_demand,
    write_forever,
)
from tests.tensor_plane.test_planes import assert_soon

NUM_BYTES = 3 << 20
NUM_KILLS = [
    pytest.param(5, id="short"),
    pytest.param(100, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
_MOST_READS = 5
_NUM_GPUS = torch.cuda.device_count()
SETTINGS = [
    pytest.param(PlaneKind.CUDA_IPC, "cuda:0", id="cuda_ipc"),
    pytest.param(PlaneKind.SHARED_MEMORY, "cuda:0", id="shared_memory"),
    pytest.param(PlaneKind.GLOO, "cuda:0", id="gloo"),
    pytest.param(
        PlaneKind.CUDA_IPC,
        "cuda:1",
        id="cuda_ipc_to_a_peer",
        marks=pytest.mark.skipif(_NUM_GPUS < 2, reason="there are not two GPUs"),
    ),
    pytest.param(
        PlaneKind.NCCL, "cuda:1", id="nccl", marks=pytest.mark.skipif(_NUM_GPUS < 2, reason="there are not two GPUs")
    ),
]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _NUM_GPUS, reason="there is no GPU")]


def _connect(writers: PlaneWriters, pipe: Connection, kind: PlaneKind) -> PlaneWriter:
    offer = writers.offer()
    pipe.send(offer)
    report = answer(pipe)
    assert report.kind == kind, report.text()
    writer = writers.writer(offer.offer_id)
    assert writer is not None
    return writer


def _is_unharmed(device: str) -> bool:
    return float(torch.ones(1000, device=device).sum()) == 1000


def _check_nothing_is_kept(free_bytes: list[int]) -> None:
    """``free_bytes``: of the card after each death."""
    assert free_bytes[-1] >= free_bytes[1] - (4 << 20), "or a test beside this one uses the card: run this file alone"


@pytest.mark.parametrize(("kind", "other"), SETTINGS)
def test_equal_bytes_arrive_in_another_process(kind: PlaneKind, other: str) -> None:
    writers = PlaneWriters(torch.device("cuda:0"), kinds=(kind,), limits=LIMITS)
    with process(read_on_demand, LIMITS, other) as (_, pipe):
        writer = _connect(writers, pipe, kind)
        for num_rows in (1, 6, 64, 500):
            rows = torch.randn(num_rows, 1024, device="cuda:0").bfloat16()
            references = writer.put(rows, [num_rows])
            assert references is not None
            writer.synchronize()
            pipe.send(references[0])
            assert answer(pipe) == digest(rows)
    writers.close()


@pytest.mark.parametrize(("kind", "other"), SETTINGS)
def test_tensors_of_any_size_at_any_byte(kind: PlaneKind, other: str) -> None:
    sizes = [8, 1, 7, 16, 4_099, 3, 2, 147_456, 1 << 20]
    writers = PlaneWriters(torch.device("cuda:0"), kinds=(kind,), limits=LIMITS)
    with process(read_on_demand, LIMITS, other) as (_, pipe):
        writer = _connect(writers, pipe, kind)
        with torch.inference_mode():
            rows = torch.randint(256, (sum(sizes),), dtype=torch.uint8, device="cuda:0")
        for _ in range(3):
            references = writer.put(rows, sizes)
            assert references is not None
            writer.synchronize()
            for reference, content in zip(references, torch.split(rows, sizes), strict=True):
                pipe.send(reference)
                assert answer(pipe) == digest(content)
    writers.close()


def test_on_one_card_all_planes_but_nccl_are_tried_and_timed() -> None:
    writers = PlaneWriters(torch.device("cuda:0"), kinds=AUTOMATIC, limits=LIMITS)
    with process(read_on_demand, LIMITS, "cuda:0") as (_, pipe):
        pipe.send(writers.offer())
        report = answer(pipe)
        reasons = dict(report.reasons)
        assert reasons.pop("nccl") == "both are on one GPU"
        assert report.kind is PlaneKind.CUDA_IPC
        assert {report.kind, *reasons} == {PlaneKind.CUDA_IPC, PlaneKind.SHARED_MEMORY, PlaneKind.GLOO}
        assert all(reason.endswith("ms a probe") for reason in reasons.values())
    writers.close()


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize(("kind", "other"), SETTINGS)
def test_a_reader_that_is_killed_in_the_middle(kind: PlaneKind, other: str, num_kills: int) -> None:
    writers = PlaneWriters(torch.device("cuda:0"), kinds=(kind,), limits=LIMITS)
    rows = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8, device="cuda:0")
    free = []
    for _ in range(num_kills):
        with process(read_on_demand, LIMITS, other) as (child, pipe):
            writer = _connect(writers, pipe, kind)
            for _ in range(4):
                writer.put(rows, [NUM_BYTES])
            kill(child)
            assert_soon(partial(getattr, writer, "is_closed"))
        assert _is_unharmed("cuda:0")
        free.append(torch.cuda.mem_get_info(0)[0])
    writers.close()
    _check_nothing_is_kept(free)


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize(("kind", "other"), SETTINGS)
def test_a_writer_that_is_killed_in_the_middle(kind: PlaneKind, other: str, num_kills: int) -> None:
    readers = PlaneReaders(torch.device("cuda:0"), limits=LIMITS)
    out = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda:0")
    free = []
    for number in range(num_kills):
        with process(write_forever, kind, LIMITS, NUM_BYTES, other) as (child, pipe):
            reader = readers.accept(answer(pipe))
            report = reader.wait_for_report(OPENING_S)
            assert report is not None
            assert report.kind == kind, report.text()
            num_right = 0
            while not reader.is_closed:
                try:
                    reference, expected = answer(pipe)
                    if num_right == number % _MOST_READS + 1:
                        kill(child)
                    readers.read(reference, out)
                    assert digest(out) == expected
                    num_right += 1
                except (StaleReferenceError, EOFError, OSError):
                    assert num_right
                    time.sleep(0.01)
        assert _is_unharmed("cuda:0")
        free.append(torch.cuda.mem_get_info(0)[0])
    readers.close()
    _check_nothing_is_kept(free)


@pytest.mark.skipif(_NUM_GPUS < 2, reason="there are not two GPUs")
def test_a_nccl_transfer_that_hangs_is_aborted_and_the_process_goes_on() -> None:
    limits = impatient(silence_s=3.0, transfer_s=1.0)
    writers = PlaneWriters(torch.device("cuda:0"), kinds=(PlaneKind.NCCL,), limits=limits)
    rows = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:0")
    with process(read_on_demand, limits, "cuda:1") as (hung, pipe):
        writer = _connect(writers, pipe, PlaneKind.NCCL)
        assert hung.pid is not None
        os.kill(hung.pid, signal.SIGSTOP)
        writer.put(rows, [NUM_BYTES])
        assert_soon(lambda: writer.is_closed)
        assert _is_unharmed("cuda:0")
    writers.close()
