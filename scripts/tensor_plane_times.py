"""Time of a step's hidden states between two processes, by tensor plane: what a step takes longer with them.

One process stands for the target, one for the draft. A step is a forward of the target (matrix products), a message to
the draft, its forward, and a message back. It is timed without states and with states over each plane, in turns, so the
difference is what the plane costs where both compute. ``put`` and ``read`` are what the calls take of each thread;
``empty`` and ``launch`` what the draft's thread takes to allocate and to queue its forward, ``plain`` the latter in
steps without states; ``put gpu`` and ``read gpu`` what the copies take of each card, in steps of their own.

    python scripts/tensor_plane_times.py --device cuda:0 --other cuda:0 --kinds cuda_ipc,shared_memory
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.schema import Label, Result, Series, save
from outrider.planes import PlaneKind, PlaneOffer, PlaneReference
from outrider.tensor_plane.reader import PlaneReaders
from outrider.tensor_plane.writer import PlaneWriter, PlaneWriters

COLUMNS = ("with", "more", "put", "read", "empty", "launch", "plain", "put gpu", "read gpu")
_NUM_BLOCKS = 30
"""Turns of each way, short ones since clocks drift by more than a plane costs; the median of all steps counts."""


class Forward:
    """Matrix products for about so long, and an end that is awaited as the services do it."""

    def __init__(self, device: torch.device, num_products: int) -> None:
        size = 4096 if device.type == "cuda" else 256
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._left = torch.randn(size, size, device=device, dtype=dtype)
        self._num_products, self._device = num_products, device

    def queue(self) -> None:
        """Start it."""
        for _ in range(self._num_products):
            torch.mm(self._left, self._left)

    def wait(self) -> None:
        """Wait until all that is queued has ended."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class DeviceTimer:
    """Time that a card takes for what is queued in between; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]

    def mark(self, place: int) -> None:
        """Record an event before (0) or behind (1) it."""
        if self._events:
            self._events[place].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """Seconds between both marks, once they were reached."""
        return 1e-3 * self._events[0].elapsed_time(self._events[1]) if self._events else 0.0


def draft(pipe: Connection, device_name: str, shape: tuple[int, int], num_products: int) -> None:
    """Answer each message after a forward over the states that it refers to: seconds to allocate, to read, to queue the
    forward, and of the card to read.
    """
    device = torch.device(device_name)
    readers, forward, timer = PlaneReaders(device), Forward(device, num_products), DeviceTimer(device)
    while (asked := pipe.recv()) is not None:
        # Plain numbers, as messages between services carry them.
        reference, is_timed = (PlaneReference(*asked[:-1]), asked[-1]) if isinstance(asked, tuple) else (None, False)
        began = allocated = read = time.perf_counter()
        if isinstance(asked, PlaneOffer):
            pipe.send(readers.accept(asked).wait_for_report(60))
            continue
        if reference is not None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
            allocated = time.perf_counter()
            if is_timed:
                timer.mark(0)
            readers.read(reference, out)
            if is_timed:
                timer.mark(1)
            read = time.perf_counter()
        forward.queue()
        queued = time.perf_counter()
        forward.wait()
        pipe.send((allocated - began, read - allocated, queued - read, timer.seconds() if is_timed else 0.0))
    readers.close()


def steps(
    pipe: Connection, forward: Forward, writer: PlaneWriter | None, rows: torch.Tensor, count: int, *,
    timer: DeviceTimer | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Parts of each step in microseconds; ``timer`` for those of the cards."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        forward.queue()
        references = None
        before = time.perf_counter()
        if writer is not None:
            if timer is not None:
                timer.mark(0)
            references = writer.put(rows, [rows.shape[0]])
            if timer is not None:
                timer.mark(1)
        put_s = time.perf_counter() - before
        forward.wait()
        if references is None:
            pipe.send("step")
        else:
            place = references[0]
            pipe.send((place.plane_id, place.offset_bytes, place.num_bytes, place.sequence, timer is not None))
        empty_s, read_s, launch_s, read_gpu_s = pipe.recv()
        taken = {
            "step": time.perf_counter() - began, "put": put_s, "empty": empty_s, "read": read_s, "launch": launch_s,
            "read gpu": read_gpu_s, "put gpu": 0.0 if timer is None else timer.seconds(),
        }  # fmt: skip
        found.append({name: 1e6 * seconds for name, seconds in taken.items()})
        if writer is not None and references is None:
            raise RuntimeError("the ring is full")
    return found


def measure(options: argparse.Namespace, kind: PlaneKind) -> tuple[str, tuple[Series, ...]]:
    """A line of the table, and what is saved of it."""
    device = torch.device(options.device)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    shape = options.rows, options.width
    arguments = theirs, options.other, shape, options.draft_products
    child = context.Process(target=draft, args=arguments, daemon=True)
    child.start()
    writers = PlaneWriters(device, kinds=(kind,))
    try:
        offer = writers.offer()
        ours.send(offer)
        report = ours.recv()
        writer = writers.writer(offer.offer_id)
        if report is None or report.kind is not kind or writer is None:
            return f"{kind:14} not used: {'no report' if report is None else report.text()}", ()
        rows = torch.randn(options.rows, options.width, device=device).bfloat16()
        forward = Forward(device, options.target_products)
        plain: list[dict[str, float]] = []
        with_states: list[dict[str, float]] = []
        steps_a_turn = max(1, options.steps // _NUM_BLOCKS)
        steps(ours, forward, None, rows, 20)
        steps(ours, forward, writer, rows, 20)
        for _ in range(_NUM_BLOCKS):
            plain += steps(ours, forward, None, rows, steps_a_turn)
            with_states += steps(ours, forward, writer, rows, steps_a_turn)
        timed = steps(ours, forward, writer, rows, 60, timer=DeviceTimer(device))
        ours.send(None)
        without = _median(plain, "step")
        labels: dict[str, Label] = {"plane": str(kind), "num_bytes": rows.nbytes}
        added = tuple(each["step"] - without for each in with_states)
        series = Series("added", "us", added, labels), Series("without", "us", (without,), labels)
        return _line(kind, report.round_trip_ms, plain, with_states, timed), series
    finally:
        writers.close()
        child.join(10)
        child.kill()


def _median(found: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in found)


def _line(
    kind: PlaneKind,
    probe_ms: float,
    plain: Sequence[dict[str, float]],
    states: Sequence[dict[str, float]],
    timed: Sequence[dict[str, float]],
) -> str:
    without, taken = _median(plain, "step"), _median(states, "step")
    parts = {
        "with": taken, "more": taken - without, **{name: _median(states, name) for name in COLUMNS[2:6]},
        "plain": _median(plain, "launch"), **{name: _median(timed, name) for name in COLUMNS[7:]},
    }  # fmt: skip
    return f"{kind:14} {1e3 * probe_ms:7.0f} {without:7.0f} " + " ".join(f"{parts[name]:8.0f}" for name in COLUMNS)


def main() -> None:
    """Print a table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="the target's")
    parser.add_argument("--other", default="cpu", help="the draft's")
    parser.add_argument("--kinds", default="shared_memory,gloo")
    parser.add_argument("--rows", type=int, default=6, help="positions")
    parser.add_argument("--width", type=int, default=3 * 4096, help="values of a position, bfloat16")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--target-products", type=int, default=10)
    parser.add_argument("--draft-products", type=int, default=2)
    options = parser.parse_args()
    print(f"{2 * options.rows * options.width:,} bytes, {options.device} to {options.other}; medians, us")
    print(f"{'plane':14} {'probe':>7} {'without':>7} " + " ".join(f"{name:>8}" for name in COLUMNS))
    series: tuple[Series, ...] = ()
    for kind in options.kinds.split(","):
        line, found = measure(options, PlaneKind(kind))
        series += found
        print(line, flush=True)
    if options.save:
        save(_result(options, series))


def _result(options: argparse.Namespace, series: tuple[Series, ...]) -> Result:
    facts = {"from": options.device, "to": options.other, "rows": options.rows, "width": options.width}
    return Result("planes", options.save, now(), describe_environment(options.device), facts, series)


if __name__ == "__main__":
    main()
