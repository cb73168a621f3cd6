"""Child processes started, restarted and stopped, with services that need no model."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cli.stack import probe, supervisor
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.plan import ServiceSpec, StackPlan
from outrider.cli.stack.probe import is_serving
from outrider.cli.stack.supervisor import Stack
from outrider.errors import UnavailableError
from tests.support.processes import is_alive

DEADLINE_S = 240.0


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.pauses_s: list[float] = []

    def starting(self, spec: ServiceSpec) -> None:
        self.events.append(("starting", spec.name))

    def serving(self, spec: ServiceSpec) -> None:
        self.events.append(("serving", spec.name))

    def lost(self, spec: ServiceSpec, reason: str, retry_in_s: float) -> None:
        self.events.append(("lost", f"{spec.name}: {reason}"))
        self.pauses_s.append(retry_in_s)

    def has_served_twice(self, name: str) -> bool:
        return self.events.count(("serving", name)) == 2

    def line(self, spec: ServiceSpec, text: str) -> None:
        self.events.append(("line", text))


def spec(name: str, *argv: str, stop_within_s: float = 120.0) -> ServiceSpec:
    port = hold_port()
    return ServiceSpec(
        name=name,
        module="tests.cli.fake_service",
        argv=("--port", str(port), "--name", name, *argv),
        address=f"127.0.0.1:{port}",
        stop_within_s=stop_within_s,
    )


def plan(*argv: str, target: tuple[str, ...] = (), draft: tuple[str, ...] = ()) -> StackPlan:
    return StackPlan(
        models=(spec("target", *argv, *target), spec("draft", *argv, *draft)),
        coordinators=(spec("coordinator", *argv),),
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_models_serve_before_the_coordinator_starts_and_stop_after_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorder = Recorder()
    async with Stack(plan("--log", str(log)), probe=is_serving, listener=recorder) as stack:
        pids = stack.pids
        assert set(pids) == {"target", "draft", "coordinator"}
        coordinator_start = recorder.events.index(("starting", "coordinator"))
        assert recorder.events.index(("serving", "target")) < coordinator_start
        assert recorder.events.index(("serving", "draft")) < coordinator_start
    assert not any(is_alive(pid) for pid in pids.values())
    down = [line for line in log.read_text().splitlines() if line.endswith("down")]
    assert down[0] == "coordinator down"
    assert sorted(down[1:]) == ["draft down", "target down"]


async def test_a_service_that_ends_at_start_is_reported_in_its_own_words() -> None:
    recorder = Recorder()
    with pytest.raises(UnavailableError, match=r"draft service did not start: no weights in /nowhere \(exit code 1\)"):
        failing = plan(draft=("--fail", "no weights in /nowhere"))
        async with Stack(failing, probe=functools.partial(is_serving, waits=True), listener=recorder):
            pytest.fail("it cannot have started")
    assert ("starting", "coordinator") not in recorder.events


async def test_a_killed_draft_and_a_killed_target_are_started_again() -> None:
    recorder = Recorder()
    async with Stack(plan(), probe=functools.partial(is_serving, waits=True), listener=recorder) as stack:
        for name in ("draft", "target"):
            before = stack.pids
            os.kill(before[name], signal.SIGKILL)
            await until(functools.partial(recorder.has_served_twice, name))
            assert stack.pids[name] != before[name]
            assert {key: pid for key, pid in stack.pids.items() if key != name} == {
                key: pid for key, pid in before.items() if key != name
            }
            assert ("lost", f"{name}: killed by SIGKILL") in recorder.events


class _Ends:
    """A process that ends by itself, each time after a number of seconds of its clock; then it runs on."""

    def __init__(self, uptimes_s: list[float]) -> None:
        self.now_s, self.ended, self.pid = 0.0, True, 0
        self._uptimes_s = iter(uptimes_s)

    async def start(self, spec: ServiceSpec, on_line: object) -> _Ends:
        return self

    async def wait(self) -> str:
        if (uptime_s := next(self._uptimes_s, None)) is None:
            await asyncio.Event().wait()
        self.now_s += uptime_s or 0.0
        return "exit code 1"

    async def stop(self) -> None:
        """End of one that has ended."""

    def kill(self) -> None:
        """End of one that has ended."""

    def monotonic(self) -> float:
        return self.now_s


async def test_pauses_before_a_restart_double_up_to_a_limit_and_are_short_again_after_a_long_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child, recorder = _Ends([1.0] * 5 + [supervisor.STABLE_S + 1, 1.0]), Recorder()
    monkeypatch.setattr(supervisor, "ChildProcess", child)
    monkeypatch.setattr(supervisor, "time", child)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.006)

    async def serves(address: str) -> bool:
        return True

    async with Stack(StackPlan(models=(spec("target"),), coordinators=()), probe=serves, listener=recorder):
        await until(lambda: len(recorder.pauses_s) == 7)
    assert recorder.pauses_s == [0.001, 0.002, 0.004, 0.006, 0.006, 0.001, 0.002]


async def test_a_service_that_fails_to_start_again_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, answers = Recorder(), iter([True, False, False])
    monkeypatch.setattr(supervisor, "ChildProcess", _Ends([1.0] * 3))
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.001)

    async def serves(address: str) -> bool:
        return next(answers, True)

    async with Stack(StackPlan(models=(spec("target"),), coordinators=()), probe=serves, listener=recorder) as stack:
        await stack.watch(until(lambda: recorder.has_served_twice("target")))
    assert len(recorder.pauses_s) == 2


async def test_a_service_that_does_not_stop_is_killed() -> None:
    stubborn = spec("coordinator", "--ignore-sigterm", stop_within_s=0.2)
    async with Stack(
        StackPlan(models=plan().models[:1], coordinators=(stubborn,)), probe=is_serving, listener=Recorder()
    ) as stack:
        pids = stack.pids
    assert not any(is_alive(pid) for pid in pids.values())


async def test_a_probe_that_waits_asks_once_and_is_answered_when_the_service_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()

    class Health(health.aio.HealthServicer):  # type: ignore[misc]
        async def Watch(self, request: object, context: object) -> None:
            asked.put_nowait("watch")
            await super().Watch(request, context)

    service, server = Health(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await service.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    try:
        assert not await is_serving(address)
        assert asked.empty()
        with monkeypatch.context() as patch:
            patch.setattr(probe, "CALL_TIMEOUT_S", 0.5)
            assert not await is_serving(address, waits=True)
        monkeypatch.setattr(probe, "CALL_TIMEOUT_S", DEADLINE_S)
        waiting = asyncio.create_task(is_serving(address, waits=True))
        for _ in range(2):
            async with asyncio.timeout(DEADLINE_S):
                await asked.get()
        await service.set("", health_pb2.HealthCheckResponse.SERVING)
        assert await waiting
        assert asked.empty()
    finally:
        await server.stop(None)


PARENT = """
import asyncio, sys
from outrider.cli.stack.probe import is_serving
from outrider.cli.stack.supervisor import Stack
from tests.cli.test_stack import Recorder, plan

async def main():
    async with Stack(plan("--ignore-sigterm"), probe=is_serving, listener=Recorder()) as stack:
        print(*stack.pids.values(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_child_outlives_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.01)


def test_the_lifeline_alone_ends_a_child() -> None:
    """The end of standard input ends a child, too, if the kernel does not report the parent's end."""
    code = (
        "import sys; sys.platform = 'other'\n"
        "from outrider.cli.stack.child import main\n"
        f"main([{str(os.getpid())!r}, 'tests.cli.fake_service', '--port', {str(hold_port())!r}, '--ignore-sigterm'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
