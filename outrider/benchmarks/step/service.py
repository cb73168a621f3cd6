"""One of the three processes: `python -m outrider.benchmarks.step.service draft|target|coordinator ADDRESS`.

The draft and the target are stand-ins, the coordinator is the real one. Prints the address once it listens and ends
when its standard input does, so that it never outlives who started it.
"""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment

os.environ.update(grpc_environment())  # before gRPC is imported

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from outrider.benchmarks.step.stamps import StampedPort, Stamps
from outrider.benchmarks.step.stand_in import make_draft, make_target
from outrider.config import CoordinatorSettings
from outrider.process.cpu_affinity.keeper import pinned_to_cpus
from outrider.process.hosting import run
from outrider.process.tuning import freeze_objects
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import Server, serve_draft, serve_generation, serve_target
from outrider_coordinator.service import Coordinator


async def serve(given: argparse.Namespace) -> None:
    """Listen at `host:port` (0: any) or `unix:/path` until standard input ends."""
    async with _serving(given) as server:
        await server.set_serving(True)
        print(server.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


@contextlib.asynccontextmanager
async def _serving(given: argparse.Namespace) -> AsyncIterator[Server]:
    host, port = _split(given.address)
    stamps = Stamps()
    if given.role == "coordinator":
        settings = CoordinatorSettings.model_validate({"tokenizer": given.tokenizer, "draft_length": "fixed"})
        target = StampedPort(RemoteTarget(given.target_address), stamps, "target", is_remote=True)
        draft = StampedPort(RemoteDraft(given.draft_address), stamps, "draft", is_remote=True)
        coordinator = Coordinator(target, draft, settings)
        await coordinator.start()
        num_open = partial(getattr, coordinator, "num_running")
        server = await serve_generation(coordinator, host=host, port=port)
    else:
        make, listen = (make_draft, serve_draft) if given.role == "draft" else (make_target, serve_target)
        note = partial(stamps.note, given.role)
        port_itself = make(busy_s=given.busy_ms / 1e3, acceptance=given.acceptance, note=note)
        num_open = partial(getattr, port_itself, "num_sessions")
        server = await listen(StampedPort(port_itself, stamps, given.role, is_remote=False), host=host, port=port)
    freeze_objects()
    try:
        async with pinned_to_cpus(given.pinned_cpus, num_open):
            yield server
    finally:
        stamps.save(Path(given.stamps))
        if given.role == "coordinator":
            await coordinator.close()
        await server.stop()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return (address, 0) if host == "unix" else (host, int(port))


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(prog="python -m outrider.benchmarks.step.service", description=__doc__)
    parser.add_argument("role", choices=("draft", "target", "coordinator"))
    parser.add_argument("address")
    parser.add_argument("--pinned-cpus", type=int)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--busy-ms", type=float, default=0.0)
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.add_argument("--draft-address")
    parser.add_argument("--target-address")
    parser.add_argument("--tokenizer")
    run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
