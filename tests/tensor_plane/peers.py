"""Writers and readers in processes of their own, which tests kill, stop and question."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from outrider.errors import StaleReferenceError
from outrider.planes import PlaneKind, PlaneOffer, PlaneReference
from outrider.tensor_plane import shared_file
from outrider.tensor_plane.endpoints import PlaneLimits
from outrider.tensor_plane.reader import PlaneReaders
from outrider.tensor_plane.writer import PlaneWriters

CPU = torch.device("cpu")
# Times of a busy host, on which a peer may not run for seconds.
LIMITS = PlaneLimits(ring_bytes=8 << 20, transfer_s=30.0, opening_s=120.0, silence_s=30.0, unread_s=120.0)
OPENING_S = 240.0
"""Processes of a busy host take their time."""

_FOLDER = "TESTS_SHARED_FILES"
if _FOLDER not in os.environ:  # what this process and those that it starts share; files of other tests come and go
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="shared-files-", dir=shared_file.FOLDER)
    atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)
shared_file.FOLDER = Path(os.environ[_FOLDER])

_context = mp.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@contextlib.contextmanager
def process(work: Callable[..., None], *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process and a pipe to it; killed at the end."""
    ours, theirs = _context.Pipe()
    child = _context.Process(target=work, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        ours.close()
        kill(child)
        child.close()


def kill(child: BaseProcess) -> None:
    """Kill as the kernel does when memory runs out."""
    assert child.pid is not None
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join(120)


def answer(pipe: Connection) -> Any:
    """The next message of a process; a failure when it takes too long."""
    assert pipe.poll(OPENING_S), "the other process says nothing"
    return pipe.recv()


def read_on_demand(pipe: Connection, limits: PlaneLimits, device: str = "cpu") -> None:
    """Accept offers, and answer references with the digest of what was read."""
    readers = PlaneReaders(torch.device(device), limits=limits)
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = pipe.recv()
            if isinstance(asked, PlaneOffer):
                report = readers.accept(asked).wait_for_report(OPENING_S)
                pipe.send(report)
            else:
                pipe.send(_digest_of(readers, asked, device))
    readers.close()


def _digest_of(readers: PlaneReaders, reference: PlaneReference, device: str) -> str:
    out = torch.empty(reference.num_bytes, dtype=torch.uint8, device=device)
    try:
        readers.read(reference, out)
    except StaleReferenceError as error:
        return f"stale: {error}"
    return digest(out)


def write_forever(pipe: Connection, kind: PlaneKind, limits: PlaneLimits, num_bytes: int, device: str = "cpu") -> None:
    """Offer, then write as fast as there is room and send each reference with its digest."""
    writers = PlaneWriters(torch.device(device), kinds=(kind,), limits=limits)
    offer = writers.offer()
    pipe.send(offer)
    values = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    while True:
        values.add_(1)
        writer = writers.writer(offer.offer_id)
        references = writer.put(values, [num_bytes]) if writer is not None else None
        if references and writer is not None:
            writer.synchronize()
            pipe.send((references[0], digest(values)))
        else:
            threading.Event().wait(0.001)


def digest(content: torch.Tensor) -> str:
    """Digest of a tensor's bytes."""
    return hashlib.sha256(content.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def impatient(**changes: Any) -> PlaneLimits:
    """The limits, some of them shorter."""
    return replace(LIMITS, **changes)


def holdings() -> tuple[int, int, int]:
    """Descriptors and threads of this process, and files in shared memory of it and those that it started."""
    files = list(shared_file.FOLDER.glob("outrider-*"))
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(files)
