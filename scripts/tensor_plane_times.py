"""Time of a step's hidden states between two processes, by tensor plane: what a step takes longer with them.

One process stands for the target, one for the draft. A step is a forward of the target (matrix products), a message to
the draft, its forward, and a message back. It is timed without states and with states over each plane, in turns, so the
difference is what the plane costs where both compute. ``put`` and ``read`` are what the calls take of each thread.

    python scripts/tensor_plane_times.py --device cuda:0 --other cuda:0 --kinds cuda_ipc,shared_memory
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from multiprocessing.connection import Connection

import torch

from outrider.planes import PlaneKind, PlaneReference
from outrider.tensor_plane.reader import PlaneReaders
from outrider.tensor_plane.writer import PlaneWriter, PlaneWriters

_NUM_BLOCKS = 6
"""Turns of each way; the median of all steps counts."""


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
        """Until all that is queued has ended."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def draft(pipe: Connection, device_name: str, shape: tuple[int, int], num_products: int) -> None:
    """Answer each message after a forward over the states that it refers to."""
    device = torch.device(device_name)
    readers, forward = PlaneReaders(device), Forward(device, num_products)
    while (asked := pipe.recv()) is not None:
        read_s = 0.0
        if isinstance(asked, PlaneReference):
            began = time.perf_counter()
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
            readers.read(asked, out)
            read_s = time.perf_counter() - began
        elif asked != "step":
            pipe.send(readers.accept(asked).wait_for_report(60))
            continue
        forward.queue()
        forward.wait()
        pipe.send(read_s)
    readers.close()


def steps(
    pipe: Connection, forward: Forward, writer: PlaneWriter | None, rows: torch.Tensor, count: int
) -> list[tuple[float, ...]]:
    """(step, put, read) in microseconds."""
    found: list[tuple[float, ...]] = []
    for _ in range(count):
        began = time.perf_counter()
        forward.queue()
        references = None
        put_s = 0.0
        if writer is not None:
            before = time.perf_counter()
            references = writer.put(rows, [rows.shape[0]])
            put_s = time.perf_counter() - before
        forward.wait()
        pipe.send("step" if references is None else references[0])
        read_s = pipe.recv()
        found.append((1e6 * (time.perf_counter() - began), 1e6 * put_s, 1e6 * read_s))
        if writer is not None and references is None:
            raise RuntimeError("the ring is full")
    return found


def measure(options: argparse.Namespace, kind: PlaneKind) -> str:
    """A line of the table."""
    device = torch.device(options.device)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=draft, args=(theirs, options.other, (options.rows, options.width), options.draft_products), daemon=True
    )
    child.start()
    writers = PlaneWriters(device, kinds=(kind,))
    try:
        offer = writers.offer()
        ours.send(offer)
        report = ours.recv()
        writer = writers.writer(offer.offer_id)
        if report is None or report.kind is not kind or writer is None:
            return f"{kind:14} not used: {'no report' if report is None else report.text()}"
        rows = torch.randn(options.rows, options.width, device=device).bfloat16()
        forward = Forward(device, options.target_products)
        plain: list[tuple[float, ...]] = []
        with_states: list[tuple[float, ...]] = []
        steps(ours, forward, None, rows, 20)
        steps(ours, forward, writer, rows, 20)
        for _ in range(_NUM_BLOCKS):
            plain += steps(ours, forward, None, rows, options.steps // _NUM_BLOCKS)
            with_states += steps(ours, forward, writer, rows, options.steps // _NUM_BLOCKS)
        ours.send(None)
        return _line(kind, report.round_trip_ms, plain, with_states)
    finally:
        writers.close()
        child.join(10)
        child.kill()


def _line(kind: PlaneKind, probe_ms: float, plain: list[tuple[float, ...]], states: list[tuple[float, ...]]) -> str:
    without, stepped, put, read = (
        statistics.median(values)
        for values in (
            [one[0] for one in plain],
            [one[0] for one in states],
            [one[1] for one in states],
            [one[2] for one in states],
        )
    )
    return (
        f"{kind:14} {1e3 * probe_ms:9.0f} {without:9.0f} {stepped:9.0f} {stepped - without:9.0f} {put:7.0f} {read:7.0f}"
    )


def main() -> None:
    """Print a table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="the target's")
    parser.add_argument("--other", default="cpu", help="the draft's")
    parser.add_argument("--kinds", default="shared_memory,gloo")
    parser.add_argument("--rows", type=int, default=6, help="positions")
    parser.add_argument("--width", type=int, default=3 * 4096, help="values of a position, bfloat16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target-products", type=int, default=10)
    parser.add_argument("--draft-products", type=int, default=2)
    options = parser.parse_args()
    print(f"{2 * options.rows * options.width:,} bytes, {options.device} to {options.other}; medians, us")
    print(f"{'plane':14} {'probe':>9} {'without':>9} {'with':>9} {'more':>9} {'put':>7} {'read':>7}")
    for kind in options.kinds.split(","):
        print(measure(options, PlaneKind(kind)), flush=True)


if __name__ == "__main__":
    main()
