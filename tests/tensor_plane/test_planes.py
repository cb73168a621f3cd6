"""Tensors between threads of one process: the same bytes, once, whatever the plane."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from outrider.batched import StateBatch
from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind, PlaneReference
from outrider.tensor_plane import shared_file
from outrider.tensor_plane.control import ControlConnection
from outrider.tensor_plane.endpoints import PeerFacts, PlaneLimits, why_not
from outrider.tensor_plane.negotiation import Chosen, Negotiation
from outrider.tensor_plane.open_plane import OpenPlane
from outrider.tensor_plane.opening import open_reader
from outrider.tensor_plane.process_group import ProcessGroupReader, ProcessGroupWriter
from outrider.tensor_plane.reader import PlaneReader, PlaneReaders
from outrider.tensor_plane.writer import AUTOMATIC, PlaneWriter, PlaneWriters
from outrider.types import HiddenStates
from tests.tensor_plane.peers import CPU, LIMITS, OPENING_S, holdings, impatient

KINDS = [PlaneKind.SHARED_MEMORY, PlaneKind.GLOO]


class Pair:
    """Both ends, as many of each as a test wants."""

    def __init__(self) -> None:
        self.closing: list[PlaneWriters | PlaneReaders] = []

    def writers(self, *kinds: PlaneKind, limits: PlaneLimits = LIMITS) -> PlaneWriters:
        made = PlaneWriters(CPU, kinds=kinds, limits=limits)
        self.closing.append(made)
        return made

    def readers(self, limits: PlaneLimits = LIMITS) -> PlaneReaders:
        made = PlaneReaders(CPU, limits=limits)
        self.closing.append(made)
        return made

    def connected(self, *kinds: PlaneKind, limits: PlaneLimits = LIMITS) -> tuple[PlaneWriter, PlaneReader]:
        return introduce(self.writers(*kinds, limits=limits), self.readers(limits))


def introduce(writers: PlaneWriters, readers: PlaneReaders) -> tuple[PlaneWriter, PlaneReader]:
    offer = writers.offer()
    reader = readers.accept(offer)
    assert reader.wait_for_report(OPENING_S) is not None
    writer = writers.writer(offer.offer_id)
    assert writer is not None
    return writer, reader


@pytest.fixture
def by_type(monkeypatch: pytest.MonkeyPatch) -> dict[str, ControlConnection]:
    """End of a connection that was the first to send a message of a type: of "opened" a reader, of "use" a writer."""
    found: dict[str, ControlConnection] = {}
    send = ControlConnection.send

    def noted(self: ControlConnection, message: dict[str, Any]) -> None:
        found.setdefault(message["type"], self)
        send(self, message)

    monkeypatch.setattr(ControlConnection, "send", noted)
    return found


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Readers' ends of the planes that were opened."""
    found: list[Any] = []

    def noted(*args: Any, **more: Any) -> Any:
        found.append(open_reader(*args, **more))
        return found[-1]

    monkeypatch.setattr("outrider.tensor_plane.reader.open_reader", noted)
    return found


def copies_of(end: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the copies that the end makes from now on."""
    copies: list[int] = []
    copy = end.read

    def read(out: torch.Tensor, offset: int) -> None:
        copies.append(out.numel())
        copy(out, offset)

    monkeypatch.setattr(end, "read", read)
    return copies


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for end in made.closing:
        end.close()


@pytest.fixture
def shared_memory_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced probe: on a busy machine the quickest of a few may be the socket's."""
    probe = Negotiation.probe

    def timed(negotiation: Negotiation, tried: Chosen) -> str:
        problem = probe(negotiation, tried)
        assert problem or tried.round_trip_s > 0
        tried.round_trip_s = 1e-4 if tried.kind is PlaneKind.SHARED_MEMORY else 2e-4
        return problem

    monkeypatch.setattr(Negotiation, "probe", timed)


def put(writer: PlaneWriter, rows: torch.Tensor, *sizes: int) -> list[PlaneReference]:
    references = writer.put(rows, sizes or [rows.shape[0]])
    assert references is not None
    return references


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_arrive_as_they_were(pair: Pair, kind: PlaneKind, dtype: torch.dtype) -> None:
    writer, reader = pair.connected(kind)
    assert writer.report.kind == kind
    assert reader.report is not None
    assert reader.report.kind == kind
    for step in range(20):
        rows = torch.randn(6, 3, 40 + step).to(dtype)
        first, second = put(writer, rows, 2, 4)
        outs = torch.full_like(rows[2:], torch.nan), torch.full_like(rows[:2], torch.nan)
        reader.read(second, outs[0])  # in any order
        reader.read(first, outs[1])
        assert torch.equal(torch.cat(outs[::-1]), rows)


def test_a_writer_hears_of_reads_while_it_puts(pair: Pair) -> None:
    writer, reader = pair.connected(PlaneKind.SHARED_MEMORY)
    rows = torch.arange(64, dtype=torch.uint8)
    most_unread = 0
    for _ in range(500):
        (reference,) = put(writer, rows)
        reader.read(reference, torch.empty_like(rows))
        most_unread = max(most_unread, writer.num_unread)
    assert most_unread < 100


@pytest.mark.parametrize("gap", [0, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_several_are_read_together_but_those_that_are_stale(
    pair: Pair, kind: PlaneKind, gap: int, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pair.connected(kind)
    monkeypatch.setattr(ends[0], "widest_gap_bytes", gap)
    copies = copies_of(ends[0], monkeypatch)
    rows = torch.randint(256, (12, 100), dtype=torch.uint8)
    first, second, third, fourth = put(writer, rows, 3, 4, 2, 3)
    reader.read(third, torch.empty_like(rows[7:9]))
    kept = second.part(0, 300)  # one row of it was rejected
    copies.clear()
    found = reader.read_all([fourth, third, first, kept, first])
    expected = [rows[9:], None, rows[:3], rows[3:6], None]
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or wanted is None or torch.equal(got, wanted.reshape(-1))
    assert copies == ([1200] if gap else [600, 300])
    assert reader.read_all([first, kept, fourth]) == [None] * 3
    with pytest.raises(StaleReferenceError, match="read before"):
        reader.read(kept, torch.empty_like(rows[3:6]))
    put(writer, rows, 12)
    assert_soon(lambda: writer.num_unread == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_unread_is_written_over_and_a_full_ring_says_so(pair: Pair, kind: PlaneKind) -> None:
    writer, reader = pair.connected(kind, limits=impatient(ring_bytes=1 << 20))
    rows = [torch.full((1, 200_000), value, dtype=torch.uint8) for value in range(6)]
    references = [writer.put(each, [1]) for each in rows]
    assert [reference is not None for reference in references] == [True] * 5 + [False]
    out = torch.empty(200_000, dtype=torch.uint8)
    for value, reference in enumerate(references[:5]):
        assert reference is not None
        reader.read(reference[0], out)
        assert (out == value).all()
    assert_soon(lambda: writer.put(rows[5], [1]) is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_is_read_once(pair: Pair, kind: PlaneKind) -> None:
    writer, reader = pair.connected(kind)
    rows = torch.ones(2, 100)
    (reference,) = put(writer, rows)
    reader.read(reference, torch.empty_like(rows))
    begin = time.monotonic()
    with pytest.raises(StaleReferenceError, match="read before"):
        reader.read(reference, torch.empty_like(rows))
    assert time.monotonic() - begin < LIMITS.transfer_s


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_fetches_is_given_up_and_then_stale(pair: Pair, kind: PlaneKind) -> None:
    writer, reader = pair.connected(kind, limits=impatient(unread_s=2.0))
    (late,) = put(writer, torch.ones(2, 100))
    assert_soon(lambda: writer.num_unread == 0)
    with pytest.raises(StaleReferenceError, match="given up"):
        reader.read(late, torch.empty(2, 100))
    (fresh,) = put(writer, torch.ones(2, 100))
    reader.read(fresh, torch.empty(2, 100))


def test_a_place_is_used_again_once_the_reader_has_confirmed_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may be in the middle of a copy until then."""
    unread: list[int] = []
    raise_floor = OpenPlane.raise_floor

    def confirm(plane: OpenPlane, floor: int) -> None:
        if floor > 1:
            unread.append(writer.num_unread)
        raise_floor(plane, floor)

    monkeypatch.setattr(OpenPlane, "raise_floor", confirm)
    writer, _ = pair.connected(PlaneKind.SHARED_MEMORY, limits=impatient(unread_s=0.0))
    (late,) = put(writer, torch.ones(2, 100))
    assert late.sequence == 1
    assert_soon(lambda: writer.num_unread == 0)
    assert unread[:1] == [1]


def test_a_reference_of_a_closed_plane_or_of_another_size_is_stale(pair: Pair) -> None:
    writers, readers = pair.writers(PlaneKind.SHARED_MEMORY), pair.readers()
    writer, reader = introduce(writers, readers)
    (reference,) = put(writer, torch.ones(2, 100))
    with pytest.raises(StaleReferenceError, match="800 bytes"):
        readers.read(reference, torch.empty(3, 100))
    reader.close()
    with pytest.raises(StaleReferenceError, match="closed"):
        readers.read(reference, torch.empty(2, 100))
    assert_soon(lambda: writer.is_closed)
    assert writer.put(torch.ones(2, 100), [2]) is None


def test_a_reference_outside_the_ring_reads_nothing(pair: Pair) -> None:
    from dataclasses import replace

    writer, reader = pair.connected(PlaneKind.SHARED_MEMORY)
    (reference,) = put(writer, torch.ones(2, 100))
    with pytest.raises(StaleReferenceError):
        reader.read(replace(reference, offset_bytes=LIMITS.ring_bytes - 8), torch.empty(2, 100))


@pytest.mark.usefixtures("shared_memory_is_faster")
def test_the_fastest_plane_is_chosen_and_the_reasons_are_told(pair: Pair) -> None:
    writer, reader = pair.connected(*AUTOMATIC)
    report = reader.report
    assert report is not None
    assert report == writer.report
    assert report.kind is PlaneKind.SHARED_MEMORY
    assert report.round_trip_ms == pytest.approx(0.1)
    reasons = dict(report.reasons)
    assert reasons["cuda_ipc"] == "one side has no GPU"
    assert reasons["gloo"] == "0.20 ms a probe"
    assert "shared_memory (" in report.text()


def test_without_a_plane_tensors_travel_inline(pair: Pair) -> None:
    writer, _ = pair.connected(PlaneKind.INLINE)
    assert writer.report.kind is PlaneKind.INLINE
    assert writer.put(torch.ones(2, 100), [2]) is None
    assert not writer.is_closed


@pytest.mark.usefixtures("shared_memory_is_faster")
def test_the_next_plane_takes_over_from_one_that_fails(pair: Pair, by_type: dict[str, ControlConnection]) -> None:
    writer, reader = pair.connected(PlaneKind.SHARED_MEMORY, PlaneKind.GLOO)
    assert writer.report.kind == "shared_memory"
    (lost,) = put(writer, torch.ones(2, 100))
    by_type["opened"].send({"type": "broken", "plane": lost.plane_id.hex(), "reason": "it was cut"})
    assert_soon(lambda: writer.report.kind == "gloo")
    assert dict(writer.report.reasons)["shared_memory"] == "it was cut"
    with pytest.raises(StaleReferenceError):
        reader.read(lost, torch.empty(2, 100))
    rows = torch.randn(2, 100)
    (reference,) = put(writer, rows)
    out = torch.empty_like(rows)
    reader.read(reference, out)
    assert torch.equal(out, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_one_writer_has_several_readers_and_one_reader_several_writers(pair: Pair, kind: PlaneKind) -> None:
    targets = [pair.writers(kind) for _ in range(2)]
    drafts = [pair.readers() for _ in range(2)]
    ends = {(t, d): introduce(targets[t], drafts[d])[0] for t in range(2) for d in range(2)}
    rows = {key: torch.randn(3, 50) for key in ends}
    references = {key: put(writer, rows[key])[0] for key, writer in ends.items()}
    for (target, draft), reference in references.items():
        with pytest.raises(StaleReferenceError):
            drafts[1 - draft].read(reference, torch.empty(3, 50))
        out = torch.empty(3, 50)
        drafts[draft].read(reference, out)
        assert torch.equal(out, rows[target, draft])


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_connection_gives_back_all_at_once(pair: Pair, kind: PlaneKind) -> None:
    """Memory is given back without the garbage collector, which a service rarely runs."""
    writers, readers = pair.writers(kind), pair.readers()
    held: list[tuple[int, int, int]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            writer, reader = introduce(writers, readers)
            put(writer, torch.ones(2, 100))
            reader.close()
            assert_soon(partial(getattr, writer, "is_closed"))
            del writer, reader
            if held:
                assert_soon(lambda: all(now <= then for now, then in zip(holdings(), held[0], strict=True)))
            held.append(holdings())
    finally:
        gc.enable()


def test_a_connection_may_be_withdrawn_while_all_are_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Withdrawal as by the thread that ends those of a link, when a service with several drafts stops."""
    writers = pair.writers(PlaneKind.SHARED_MEMORY)
    offers = [writers.offer() for _ in range(3)]
    made = [writers.writer(offer.offer_id) for offer in offers]
    first = made[0]
    assert first is not None
    close = first.close

    def closing() -> None:
        writers.withdraw(offers[1])
        close()

    monkeypatch.setattr(first, "close", closing)
    writers.close()
    assert all(each is not None and each.is_closed for each in made)


def test_which_planes_two_processes_can_use() -> None:
    cpu = PeerFacts("a", "cpu", "", "2")
    gpu = PeerFacts("a", "cuda", "GPU-1", "2")
    other = PeerFacts("a", "cuda", "GPU-2", "2")
    far = PeerFacts("b", "cuda", "GPU-3", "2")
    assert not why_not(PlaneKind.CUDA_IPC, gpu, gpu)
    assert not why_not(PlaneKind.CUDA_IPC, gpu, other)
    assert "hosts" in why_not(PlaneKind.CUDA_IPC, gpu, far)
    assert "no GPU" in why_not(PlaneKind.CUDA_IPC, gpu, cpu)
    assert "one GPU" in why_not(PlaneKind.NCCL, gpu, gpu)
    assert not why_not(PlaneKind.NCCL, gpu, far)
    assert "versions" in why_not(PlaneKind.NCCL, gpu, PeerFacts("b", "cuda", "GPU-3", "3"))
    assert "hosts" in why_not(PlaneKind.SHARED_MEMORY, gpu, far)
    assert not why_not(PlaneKind.GLOO, cpu, far)


def assert_soon(holds: object, within_s: float = 60.0) -> None:
    assert callable(holds)
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("on_one_gpu", "chosen"), [(True, PlaneKind.CUDA_IPC), (False, PlaneKind.SHARED_MEMORY)])
def test_cuda_ipc_is_taken_on_one_gpu_and_the_fastest_elsewhere(on_one_gpu: bool, chosen: PlaneKind) -> None:
    control, ends = Mock(), {PlaneKind.CUDA_IPC: Mock(), PlaneKind.SHARED_MEMORY: Mock()}
    times = {PlaneKind.CUDA_IPC: 0.4e-3, PlaneKind.SHARED_MEMORY: 0.1e-3}
    opened = [Chosen(kind, b"", end, times[kind]) for kind, end in ends.items()]
    talk = Negotiation(control, CPU, "127.0.0.1", LIMITS)
    best, report = talk.take_fastest(opened, {}, on_one_gpu=on_one_gpu)
    assert best is not None
    assert best.kind is report.kind is chosen
    for kind, end in ends.items():
        assert end.close.called == (kind is not chosen)


def as_batch(references: list[PlaneReference], counts: list[int], **changed: Any) -> StateBatch:
    """States of 10 bfloat16 values a position; the first ``counts`` of each reference."""
    states = [
        HiddenStates(0, count, 10, "bfloat16", b"", (reference.part(0, 20 * count),))
        for reference, count in zip(references, counts, strict=True)
    ]
    return replace(StateBatch.of(states), **changed)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_many_sessions_come_by_one_copy(
    pair: Pair, kind: PlaneKind, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pair.connected(kind)
    copies = copies_of(ends[0], monkeypatch)
    rows = torch.randn(12, 10).bfloat16()
    for counts, indices in (([3, 4, 5], range(12)), ([1, 4, 2], (0, 3, 4, 5, 6, 7, 8))):
        copies.clear()
        batched = as_batch(put(writer, rows, 3, 4, 5), counts)
        found = reader.read_rows(batched)
        assert found is not None
        batched = replace(batched, tensor=found.rows.view(torch.bfloat16), firsts=found.firsts)
        wanted = batched.indices()
        assert (wanted is None) == (len(indices) == 12)
        assert torch.equal(batched.tensor if wanted is None else batched.tensor[wanted], rows[list(indices)])
        assert torch.equal(torch.cat([one.tensor for one in batched.hidden_states()]), rows[list(indices)])
        assert len(copies) == 1
    assert_soon(lambda: writer.num_unread == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_there_are_left_for_each_to_be_read(pair: Pair, kind: PlaneKind, ends: list[Any]) -> None:
    writer, reader = pair.connected(kind, limits=impatient(transfer_s=2.0))
    rows = torch.randn(12, 10).bfloat16()
    references = put(writer, rows, 3, 4, 5)
    sound = as_batch(references, [3, 4, 5])
    first, second, third = sound.offsets_bytes.tolist()
    sequences = sound.sequences
    lying: list[dict[str, Any]] = [
        {"plane_id": bytes(16)},
        {"offsets_bytes": np.array([first, second, 1 << 63], dtype=np.uint64)},
        {"offsets_bytes": np.array([first, second, ends[0].capacity], dtype=np.uint64)},
        {"offsets_bytes": np.array([first, second + 3, third], dtype=np.uint64)},  # no whole rows apart
        {"counts": np.array([3, 4, 1 << 31], dtype=np.uint32)},
        {"sequences": sequences[[0, 1, 1]]},
        {"sequences": sequences + np.uint64(1000)} if kind is PlaneKind.GLOO else {"plane_id": b"x" * 16},
    ]
    for changed in lying:
        assert reader.read_rows(replace(sound, **changed)) is None, changed
    out = torch.empty(4, 10, dtype=torch.bfloat16)
    reader.read(references[1], out)  # nothing of them was taken
    assert torch.equal(out, rows[3:7])
    assert reader.read_rows(sound) is None  # one of them was read
    others = as_batch([references[0], references[2]], [3, 5])
    assert reader.read_rows(others) is not None


def test_who_knows_the_port_alone_does_not_take_the_readers_place() -> None:
    """The secret of a meeting goes to the reader over the connection that only it could open."""
    writer = ProcessGroupWriter(
        PlaneKind.GLOO, 1 << 20, CPU, host="127.0.0.1", limits=LIMITS, announce=lambda message: None
    )
    details = writer.details()
    joining = threading.Thread(target=writer.connect)
    joining.start()
    with pytest.raises(RuntimeError):
        ProcessGroupReader(
            PlaneKind.GLOO, {**details, "meeting": "a guess"}, CPU, limits=replace(LIMITS, opening_s=1.0)
        )
    reader = ProcessGroupReader(PlaneKind.GLOO, details, CPU, limits=LIMITS)
    joining.join(LIMITS.opening_s)
    sent, out = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    writer.write(sent, 0, {1: (0, 64)})
    reader.announce({"begin": 0, "end": 64, "of": [1]})
    reader.wait(1, LIMITS.transfer_s)
    reader.read(out, 0)
    assert torch.equal(out, sent)
    reader.close()
    writer.close()


def test_a_file_that_a_peer_shortens_ends_neither_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_existing = shared_file.open_existing

    def noted(*args: Any) -> int:
        opened.append(os.dup(descriptor := open_existing(*args)))
        return descriptor

    monkeypatch.setattr(shared_file, "open_existing", noted)
    writer, reader = pair.connected(PlaneKind.SHARED_MEMORY)
    rows = torch.arange(4096, dtype=torch.float32).reshape(8, 512)
    before, out = put(writer, rows), torch.empty_like(rows)
    os.ftruncate(opened[0], 100)
    with pytest.raises(StaleReferenceError, match="shortened"):
        reader.read(before[0], out)
    after = put(writer, rows)
    reader.read(after[0], out)
    assert torch.equal(out, rows)
    os.ftruncate(opened[0], 0)
    os.close(opened[0])


@pytest.mark.parametrize(
    "lie",
    [
        {"type": "done", "sequences": [[]]},
        {"type": "done"},
        {"type": "floor", "below": float("inf")},
        {"type": "floor", "below": "x"},
        {"type": "broken"},
        {"type": "done", "sequences": [1 << 70, -1, 2.5]},
        {"type": "try", "kind": "shared_memory"},
    ],
)
def test_a_reader_that_lies_ends_its_own_connection_at_most(
    pair: Pair, by_type: dict[str, ControlConnection], lie: dict[str, Any]
) -> None:
    writers = pair.writers(PlaneKind.SHARED_MEMORY)
    writer, _ = introduce(writers, pair.readers())
    other, honest = introduce(writers, pair.readers())
    (lost,) = put(writer, torch.ones(4, 8))
    by_type["opened"].send({**lie, "plane": lost.plane_id.hex()})
    rows, out = torch.arange(32.0).reshape(4, 8), torch.empty(4, 8)
    honest.read(put(other, rows)[0], out)
    assert torch.equal(out, rows)


@pytest.mark.parametrize(
    "lie",
    [
        {"type": "probe", "sequence": 1, "bytes": 1 << 50, "digest": True},
        {"type": "probe", "sequence": 1, "bytes": float("inf"), "digest": True},
        {"type": "try", "kind": "gloo", "details": {"host": "127.0.0.1", "port": 1, "capacity": 1 << 50}},
        {"type": "try", "kind": "shared_memory", "details": {"name": "../secret"}},
        {"type": "try", "kind": "shared_memory", "details": None},
        {"type": "floor", "below": []},
        {"type": "use", "kind": "x", "ms": 1, "reasons": 5},
        {"type": "put", "begin": -1, "end": 1 << 60, "of": [1]},
    ],
)
def test_a_writer_that_lies_ends_its_own_connection_at_most(
    pair: Pair, by_type: dict[str, ControlConnection], lie: dict[str, Any]
) -> None:
    readers = pair.readers()
    writer, _ = introduce(pair.writers(PlaneKind.GLOO), readers)
    other, _ = introduce(pair.writers(PlaneKind.SHARED_MEMORY), readers)
    (lost,) = put(writer, torch.ones(4, 8))
    by_type["use"].send({**lie, "plane": lost.plane_id.hex()})
    rows, out = torch.arange(32.0).reshape(4, 8), torch.empty(4, 8)
    readers.read(put(other, rows)[0], out)
    assert torch.equal(out, rows)
