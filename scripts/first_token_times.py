"""Parts of the time to the first token of long prompts, and of many short ones: `python scripts/first_token_times.py`.

Starts a coordinator and a target, each a process of its own, and is their client. All code is the served one but for
the device: the target's model is noise, and its forwards are not computed but take a time by their tokens, one after
the other, as on a GPU that was given them. So what lies before the first forward and between two of them is the host's
work, which does not depend on the size of a model. All processes read one clock.

Printed for each part are the medians of its time and of the processor time of its thread, in milliseconds, and in how
many rounds it was seen. Parts are named by the moments at their ends; a name with a dot is the end of what it names.
"""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment, settle_process

os.environ.update(grpc_environment())  # before gRPC is imported

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from outrider.benchmarks.child_process import child_process
from outrider.demo import TARGET

CHUNK_TOKENS = 4096
_NUM_WARM = 5
_CONFIG = {"max_position_embeddings": 1 << 17, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}

Moment = tuple[str, int, int, int]
"""Its name, when it was by the clock of all processes, the thread and that thread's processor time, in nanoseconds."""


class Moments:
    """Moments of one process."""

    def __init__(self) -> None:
        self.noted: list[Moment] = []

    def note(self, name: str) -> None:
        """Now."""
        self.noted.append((name, time.monotonic_ns(), threading.get_ident(), time.thread_time_ns()))

    def around(self, owner: Any, function: str, name: str, *, ends: bool = True) -> None:  # noqa: ANN401
        """Note when a function of a module or a class begins and, as `name`., when it has ended."""
        original = getattr(owner, function)

        @functools.wraps(original)
        def noting(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            self.note(name)
            found = original(*arguments, **named)
            if ends:
                self.note(f"{name}.")
            return found

        setattr(owner, function, noting)


# The processes.


class Device:
    """A device whose forwards take a time by their tokens, one after the other."""

    def __init__(self, moments: Moments, us_a_token: float, least_us: float) -> None:
        self.moments, self._us_a_token, self._least_us = moments, us_a_token, least_us
        self.free_ns = 0

    def launch(self, num_tokens: int) -> None:
        """One forward, behind those launched before."""
        now = time.monotonic_ns()
        self.moments.noted.append(("launch", now, threading.get_ident(), time.thread_time_ns()))
        self.moments.noted.append(("idle before", max(0, now - self.free_ns), num_tokens, 0))
        self.free_ns = max(now, self.free_ns) + int(1e3 * max(self._least_us, num_tokens * self._us_a_token))

    def mark(self, device: Any) -> _Mark:  # noqa: ANN401
        """As `outrider.kernels.device_stream.Mark`."""
        return _Mark(self, self.free_ns)


class _Mark:
    def __init__(self, device: Device, at_ns: int) -> None:
        self._device, self._at_ns, self._told = device, at_ns, False

    def is_reached(self) -> bool:
        """Whether the device has done what was launched before it."""
        return time.monotonic_ns() >= self._at_ns

    def wait(self) -> None:
        """Until then."""
        while (left := self._at_ns - time.monotonic_ns()) > 0:
            time.sleep(1e-9 * left)


def _target(given: argparse.Namespace, moments: Moments, folder: Path) -> Any:  # noqa: ANN401
    import torch

    from outrider.model_executor.device_inputs import spans_in
    from outrider.model_executor.loader.description import describe_model
    from outrider.model_executor.model_runner import ModelRunner
    from outrider.model_executor.worker import Worker
    from outrider.model_executor.worker_commands import shape_of
    from outrider.serving.engine_core import EngineCore
    from outrider.serving.in_process.engine_thread import EngineThread
    from outrider.transport import servicers
    from outrider_target import scoring_forward
    from outrider_target.executor import TargetExecutor
    from outrider_target.service import TargetService

    torch.set_num_threads(1)
    device = Device(moments, given.us_a_token, given.least_us)

    def forward(worker: Worker, command: Any, drawn: Any = None) -> Any:  # noqa: ANN401
        shape, num_logits = shape_of(command)
        torch.empty(len(command.numbers), dtype=torch.int32).numpy()[:] = command.numbers
        spans_in(command.numbers, shape)
        device.launch(shape.num_tokens)
        return torch.zeros(num_logits, worker.config.vocab_size), torch.empty(0)

    model = folder / "model"
    model.mkdir()
    config = json.loads((TARGET / "config.json").read_text()) | _CONFIG
    (model / "config.json").write_text(json.dumps(config))
    runner = ModelRunner.load(model, num_pages=1 << 15, load_format="dummy", dtype="float32")
    runner.warm_up()
    Worker.forward = forward  # type: ignore[method-assign,assignment]
    vars(scoring_forward)["Mark"] = device.mark
    ModelRunner.takes_drawn = property(lambda self: True)  # type: ignore[method-assign,assignment]
    TargetExecutor.is_asynchronous = property(lambda self: True)  # type: ignore[method-assign,assignment]
    moments.around(servicers, "target_commands_from_proto", "target: read")
    moments.around(EngineThread, "_handle", "engine: take in")
    moments.around(EngineCore, "step", "engine: step", ends=False)
    moments.around(EngineThread, "_deliver", "engine: deliver", ends=False)
    return TargetService(
        runner, describe_model("target", model, runner, load_format="dummy"), max_batched_tokens=CHUNK_TOKENS
    )


async def _coordinate(given: argparse.Namespace, moments: Moments) -> Any:  # noqa: ANN401
    from outrider.config import CoordinatorSettings
    from outrider.transport import servicers
    from outrider.transport.link.remote_link import RemoteLink
    from outrider.transport.remote import RemoteTarget
    from outrider_coordinator.requests.driver import Driver
    from outrider_coordinator.requests.input_processor import InputProcessor
    from outrider_coordinator.service import Coordinator

    moments.around(servicers, "with_trace", "coordinator: read.", ends=False)
    moments.around(InputProcessor, "checking", "coordinator: check", ends=False)
    moments.around(InputProcessor, "tokenize", "coordinator: tokenize")
    moments.around(Driver, "submit", "coordinator: place", ends=False)
    moments.around(RemoteLink, "send", "coordinator: send")
    settings = CoordinatorSettings.model_validate({"tokenizer": str(TARGET), "max_running_requests": 1024})
    coordinator = Coordinator(RemoteTarget(given.target, keeps_columns=True), None, settings)
    await coordinator.start()
    return coordinator


async def serve(given: argparse.Namespace) -> None:
    """One of the processes, until its standard input ends."""
    from outrider.transport.server import serve_generation, serve_target

    moments = Moments()
    async with contextlib.AsyncExitStack() as stack:
        listening: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
        if given.role == "coordinator":
            coordinator = await _coordinate(given, moments)
            stack.push_async_callback(coordinator.close)
            server = await serve_generation(coordinator, **listening)
        else:
            server = await serve_target(_target(given, moments, Path(given.notes).parent), **listening)
        await server.set_serving(True)
        settle_process()
        print(server.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        Path(given.notes).write_text(json.dumps(moments.noted), encoding="utf-8")
        await server.stop()


# The client.


async def measure(given: argparse.Namespace) -> list[list[Moment]]:
    """The moments of each request, of all processes."""
    from outrider.client import AsyncClient

    rng = random.Random(1)
    moments, rounds = Moments(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with _stack(given, folder) as address, AsyncClient(address) as client:
            settle_process()
            for _ in range(_NUM_WARM + given.rounds):
                prompts = [_prompt(given, rng) for _ in range(given.users)]
                began = len(moments.noted)
                await asyncio.gather(*(_first_token(client, prompt, moments, given) for prompt in prompts))
                rounds.append(moments.noted[began:])
                await asyncio.sleep(0.05)
        others = [
            (f"{moment[0]}", *moment[1:])
            for role in ("coordinator", "target")
            for moment in json.loads((folder / role).read_text())
        ]
    return [_of_round(own, others) for own in rounds[_NUM_WARM:]]


def _of_round(own: list[Moment], others: list[Moment]) -> list[Moment]:
    start, end = own[0][1], max(moment[1] for moment in own)
    found, is_in = [], False
    for moment in others:
        if moment[0] == "idle before":
            if is_in:
                found.append(moment)
            continue
        is_in = start <= moment[1] <= end
        if is_in:
            found.append(moment)
    return own + found


def _prompt(given: argparse.Namespace, rng: random.Random) -> Any:  # noqa: ANN401
    if not given.text:
        return [rng.randrange(2, 2048) for _ in range(given.tokens)]
    words = ["time", "house", "river", "answer", "people", "water", "little", "because", "should", "never"]
    return " ".join(rng.choice(words) for _ in range(given.tokens))


async def _first_token(client: Any, prompt: Any, moments: Moments, given: argparse.Namespace) -> None:  # noqa: ANN401
    moments.note("client: ask")
    async with contextlib.aclosing(
        client.stream(prompt, max_tokens=given.max_tokens, ignore_eos=True, temperature=0)
    ) as deltas:
        async for delta in deltas:
            if delta.token_ids:
                moments.note("client: first token")
                break
        async for _ in deltas:
            pass


@contextlib.asynccontextmanager
async def _stack(given: argparse.Namespace, folder: Path) -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(role: str, *arguments: str) -> str:
            same = [f"--us-a-token={given.us_a_token}", f"--least-us={given.least_us}"]
            noted = ("--role", role, "--notes", str(folder / role))
            address, _ = await stack.enter_async_context(child_process(__file__, *noted, *same, *arguments))
            return address

        yield await start("coordinator", "--target", await start("target"))


# The tables.


def print_parts(rounds: list[list[Moment]]) -> None:
    """Time between moments that follow each other, of rounds with one request."""
    spent: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    order: dict[str, None] = {}
    idles: list[float] = []
    for found in rounds:
        timed = sorted((moment for moment in found if moment[0] != "idle before"), key=lambda moment: moment[1])
        first = next(i for i, moment in enumerate(timed) if moment[0] == "launch")
        answered = next(i for i, moment in enumerate(timed) if moment[0] == "client: first token")
        idles += [moment[1] for moment in found if moment[0] == "idle before" and moment[2] > 1][1:]
        seen: dict[str, int] = defaultdict(int)
        for before, after in itertools.pairwise(timed[: first + 1]):
            name = f"{before[0]} -> {after[0]}"
            seen[name] += 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            order.setdefault(name)
            cpu = 1e-6 * (after[3] - before[3]) if before[2] == after[2] else None
            spent[name].append((1e-6 * (after[1] - before[1]), cpu))
        last = max(i for i in range(answered) if timed[i][0] == "engine: step")
        spent["* until the first launch"].append((1e-6 * (timed[first][1] - timed[0][1]), None))
        spent["* from the last step to the client"].append((1e-6 * (timed[answered][1] - timed[last][1]), None))
        spent["* whole"].append((1e-6 * (timed[answered][1] - timed[0][1]), None))
    for name in (*order, *(name for name in spent if name.startswith("*"))):
        walls = [wall for wall, _ in spent[name]]
        if len(walls) < len(rounds) / 4:
            continue
        cpus = [cpu for _, cpu in spent[name] if cpu is not None]
        shown = f"{statistics.median(cpus):8.3f}" if cpus else "       -"
        print(f"{statistics.median(walls):8.3f} {shown}  {len(walls):3}  {name}")
    if idles:
        print(
            f"{1e-6 * statistics.median(idles):8.3f}               device idle before a later forward, median; "
            f"mean {1e-6 * statistics.fmean(idles):.3f}"
        )


def print_many(rounds: list[list[Moment]]) -> None:
    """Times of the first tokens of many."""
    rows: dict[str, list[float]] = defaultdict(list)
    for found in rounds:
        start = min(moment[1] for moment in found if moment[0] == "client: ask")
        tokens = sorted(1e-6 * (moment[1] - start) for moment in found if moment[0] == "client: first token")
        launches = [1e-6 * (moment[1] - start) for moment in found if moment[0] == "launch"]
        rows["first launch"].append(launches[0])
        rows["median first token"].append(statistics.median(tokens))
        rows["mean first token"].append(statistics.fmean(tokens))
        rows["last first token"].append(tokens[-1])
        rows["launches until then"].append(sum(launch < tokens[-1] for launch in launches))
    for name, values in rows.items():
        print(f"{statistics.median(values):8.2f}  {name}")


def main() -> None:
    """The table, or one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("target", "coordinator"))
    for name in ("--notes", "--target"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=2)
    parser.add_argument("--us-a-token", type=float, default=10.0)
    parser.add_argument("--least-us", type=float, default=4000.0)
    parser.add_argument("--text", action="store_true", help="prompts are texts of so many words")
    given = parser.parse_args()
    if given.role:
        uvloop.run(serve(given))
        return
    rounds = uvloop.run(measure(given))
    (print_parts if given.users == 1 else print_many)(rounds)


if __name__ == "__main__":
    main()
