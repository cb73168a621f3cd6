"""Engine thread and links to it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from outrider.batched import ScoreAhead, ScoreBatch
from outrider.errors import UnavailableError
from outrider.ports import EventBatch
from outrider.recording import Recorder
from outrider.serving.in_process import engine_thread
from outrider.serving.in_process import link as link_module
from outrider.serving.in_process.channel_host import NoChannels
from outrider.serving.in_process.engine_thread import EngineThread

DEADLINE_S = 240.0


class EchoCore:
    """Answers each command in the step after it arrived; all that has arrived goes into one step."""

    send_verdicts: Any = None
    recorder: Recorder | None = None
    num_pages_free = 0
    longest_forward_s = 0.0

    def __init__(self) -> None:
        self.is_computing = False
        """True while it says that a device computes."""
        self.pauses: list[float] = []
        """Pauses that it answers with; after these there is none."""
        self.waiting: list[tuple[int, str]] = []
        self.steps: list[list[tuple[int, str]]] = []
        self.dropped: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.checks: list[float] = []
        """Seconds to the next look for idle sessions, last first; then none."""
        self.num_checks = 0

    @property
    def next_check_s(self) -> float | None:
        return self.checks[-1] if self.checks else None

    def end_idle_sessions(self) -> None:
        self.checks.pop()
        self.num_checks += 1

    @property
    def pause_s(self) -> float:
        return self.pauses.pop() if self.pauses else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def handle(self, link_id: int, commands: Sequence[str], *, arrived_ns: int | None = None) -> None:
        self.waiting += [(link_id, command) for command in commands]

    def expect(self, link_id: int, batched: ScoreBatch) -> None:
        self.waiting.append((link_id, f"expect {batched.draft_lengths.tolist()}"))

    def begin(self, link_id: int, said: Any, *, is_idle: bool = True) -> None:
        self.waiting.append((link_id, f"begin {said.sessions.tolist()}"))

    def drop_link(self, link_id: int) -> None:
        self.dropped.append(link_id)
        self.waiting = [entry for entry in self.waiting if entry[0] != link_id]

    @property
    def progress(self) -> tuple[bool, int]:
        return self.is_computing, len(self.steps)

    @property
    def num_sessions(self) -> int:
        return 0

    def refuse_sessions(self, reason: str) -> None:
        raise NotImplementedError

    def post_step(self) -> None:
        pass

    def step(self) -> list[tuple[int, EventBatch[str]]]:
        self.entered.set()
        if not self.gate.wait(DEADLINE_S):
            raise TimeoutError
        taken, self.waiting = self.waiting, []
        self.steps.append(taken)
        if any(command == "crash" for _, command in taken):
            raise RuntimeError("device lost")
        return [(link_id, EventBatch((command,))) for link_id, command in taken]


@pytest.fixture
async def core() -> EchoCore:
    return EchoCore()


@pytest.fixture
async def thread(core: EchoCore) -> AsyncIterator[EngineThread[str, str]]:
    engine: EngineThread[str, str] = EngineThread(core)
    yield engine
    core.gate.set()
    await asyncio.to_thread(engine.close)


async def next_events(events: AsyncIterator[EventBatch[str]]) -> tuple[str, ...]:
    batch = await asyncio.wait_for(anext(events), DEADLINE_S)
    return batch.events


async def test_answers_come_in_order(thread: EngineThread[str, str]) -> None:
    link = thread.attach()
    events = link.events()
    link.send(["a", "b"])
    link.send(["c"])
    assert [await next_events(events) for _ in range(3)] == [("a",), ("b",), ("c",)]


async def test_what_arrives_during_a_step_goes_into_the_next_one_together(
    core: EchoCore, thread: EngineThread[str, str]
) -> None:
    first, second = thread.attach(), thread.attach()
    core.gate.clear()
    first.send(["a"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    first.send(["b"])
    second.send(["c", "d"])
    core.gate.set()
    events = second.events()
    await next_events(events)
    await next_events(events)
    assert [[command for _, command in step] for step in core.steps] == [["a"], ["b", "c", "d"]]


async def test_what_can_wait_is_joined_by_what_comes_meanwhile(core: EchoCore, thread: EngineThread[str, str]) -> None:
    link = thread.attach()
    core.pauses = [DEADLINE_S] * 3
    link.send(["a"])
    async with asyncio.timeout(DEADLINE_S):
        while not core.has_work:
            await asyncio.sleep(0)
    assert core.steps == []
    core.pauses = []
    link.send(["b"])
    assert await next_events(link.events()) == ("a",)
    assert [[command for _, command in step] for step in core.steps] == [["a", "b"]]


async def test_what_can_wait_goes_when_its_time_is_up(core: EchoCore, thread: EngineThread[str, str]) -> None:
    link = thread.attach()
    core.pauses = [0.001] * 4
    link.send(["a"])
    assert await next_events(link.events()) == ("a",)
    assert core.pauses == []


async def test_close_releases_and_ends_the_events(core: EchoCore, thread: EngineThread[str, str]) -> None:
    link = thread.attach()
    link.send(["a"])
    await link.close()
    assert core.dropped == [link.link_id]
    await link.close()
    assert core.dropped == [link.link_id]
    async for batch in link.events():
        assert batch.events == ("a",)
    with pytest.raises(UnavailableError, match="closed"):
        link.send(["b"])


async def test_a_crash_breaks_every_link_and_tells(core: EchoCore) -> None:
    failures: list[BaseException] = []
    told = threading.Event()

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        told.set()

    thread: EngineThread[str, str] = EngineThread(core, on_failure=on_failure)
    links = [thread.attach(), thread.attach()]
    links[0].send(["crash"])
    for link in links:
        with pytest.raises(UnavailableError, match="device lost"):
            await next_events(link.events())
        with pytest.raises(UnavailableError, match="device lost"):
            link.send(["a"])
        await asyncio.wait_for(link.close(), DEADLINE_S)
    assert await asyncio.to_thread(told.wait, DEADLINE_S)
    assert [str(error) for error in failures] == ["device lost"]
    assert not thread.is_alive
    with pytest.raises(UnavailableError):
        thread.attach()
    await asyncio.to_thread(thread.close)


class FailingCore(EchoCore):
    """Fails at a command, and when a link is dropped that has sent another."""

    def handle(self, link_id: int, commands: Sequence[str], *, arrived_ns: int | None = None) -> None:
        if "fail" in commands:
            raise RuntimeError("bad command")
        super().handle(link_id, commands, arrived_ns=arrived_ns)

    def drop_link(self, link_id: int) -> None:
        if (link_id, "undroppable") in [entry for step in self.steps for entry in step]:
            raise RuntimeError("bad link")
        super().drop_link(link_id)


@pytest.mark.parametrize("command", ["fail", "undroppable"])
async def test_a_link_that_is_closed_when_the_core_fails_is_closed(command: str) -> None:
    core = FailingCore()
    thread: EngineThread[str, str] = EngineThread(core)
    first, second = thread.attach(), thread.attach()
    core.gate.clear()
    first.send(["undroppable"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    if command == "fail":
        second.send(["fail"])
    closing = [asyncio.create_task(link.close()) for link in (first, second)]
    await asyncio.sleep(0)  # both are asked for in the turn that fails
    core.gate.set()
    await asyncio.wait_for(asyncio.gather(*closing), DEADLINE_S)
    await asyncio.to_thread(thread.close)
    assert not thread.is_alive


async def test_links_break_when_the_core_fails_to_shut_down() -> None:
    core = FailingCore()
    failures: list[BaseException] = []
    thread: EngineThread[str, str] = EngineThread(core, on_failure=failures.append)
    link = thread.attach()
    events = link.events()
    link.send(["undroppable"])
    assert await next_events(events) == ("undroppable",)
    await asyncio.to_thread(thread.close)
    with pytest.raises(UnavailableError, match="bad link"):
        await next_events(events)
    await asyncio.wait_for(link.close(), DEADLINE_S)
    assert [str(error) for error in failures] == ["bad link"]


async def test_closing_the_worker_breaks_links_and_releases_their_sessions(
    core: EchoCore, thread: EngineThread[str, str]
) -> None:
    link = thread.attach()
    waiting = asyncio.create_task(next_events(link.events()))
    await asyncio.to_thread(thread.close)
    with pytest.raises(UnavailableError, match="shut down"):
        await asyncio.wait_for(waiting, DEADLINE_S)
    assert core.dropped == [link.link_id]


async def test_a_flood_breaks_its_own_link_alone(
    core: EchoCore, thread: EngineThread[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "MAX_PENDING_COMMANDS", 8)
    flooding, other = thread.attach(), thread.attach()
    core.gate.clear()
    other.send(["a"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    flooding.send(["x"] * 8)
    with pytest.raises(UnavailableError, match="waiting"):
        flooding.send(["x"])
    core.gate.set()
    assert await next_events(other.events()) == ("a",)
    with pytest.raises(UnavailableError):
        async for _ in flooding.events():
            pass
    other.send(["b"])
    assert await next_events(other.events()) == ("b",)
    assert core.dropped == [flooding.link_id]


async def test_a_reader_that_never_reads_loses_its_link(
    core: EchoCore, thread: EngineThread[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_UNREAD_BATCHES", 3)
    idle, other = thread.attach(), thread.attach()
    idle.send(["x"] * 5)
    other.send(["done"])
    assert await next_events(other.events()) == ("done",)
    with pytest.raises(UnavailableError, match="unread"):
        async for _ in idle.events():
            pass


def test_a_loop_that_went_away_costs_only_its_own_link(core: EchoCore) -> None:
    thread: EngineThread[str, str] = EngineThread(core)

    async def leave() -> None:
        core.gate.clear()
        thread.attach().send(["a"])

    asyncio.run(leave())
    core.gate.set()

    async def ask() -> tuple[str, ...]:
        link = thread.attach()
        link.send(["b"])
        return await next_events(link.events())

    assert asyncio.run(ask()) == ("b",)
    thread.close()
    assert 0 in core.dropped


def test_imports_no_torch() -> None:
    code = (
        "import sys, outrider_draft.service\n"
        "from outrider.serving import engine_core\n"
        "from outrider.serving.in_process import service\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_idle_sessions_are_looked_for_while_nothing_comes(core: EchoCore) -> None:
    core.checks = [0.0, 0.0]
    thread: EngineThread[str, str] = EngineThread(core)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while core.num_checks < 2:
                await asyncio.sleep(0.001)
        link = thread.attach()
        core.checks = [0.0]
        link.send(["a"])
        async for batch in link.events():
            assert batch.events == ("a",)
            break
        assert core.num_checks == 3
    finally:
        thread.close()


async def test_a_links_flood_is_handled_in_turns_and_another_link_is_answered_between_them(
    core: EchoCore, thread: EngineThread[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "MAX_COMMANDS_OF_TURN", 4)
    flooding, other = thread.attach(), thread.attach()
    core.gate.clear()
    other.send(["first"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    flooding.send([str(number) for number in range(6)])
    flooding.send([str(number) for number in range(6, 9)])
    closing = asyncio.create_task(flooding.close())
    await asyncio.sleep(0)
    other.send(["a", "b"])
    core.gate.set()
    await asyncio.wait_for(closing, DEADLINE_S)
    assert core.dropped == [flooding.link_id], "after all that it sent"
    first, second = core.steps[1:3]
    assert [command for _, command in first] == ["0", "1", "2", "3", "a", "b"]
    assert [command for _, command in second] == ["4", "5", "6", "7"]
    assert flooding.num_pending == other.num_pending == 0


def score_ahead(draft_length: int) -> ScoreAhead:
    one = np.ones(1, dtype=np.int64)
    batched = ScoreBatch(one, one, one, b"", one, one, one, draft_length * one, one[:0])
    return ScoreAhead(batched, 1, one)


async def test_what_is_to_come_is_told_after_the_other_commands(core: EchoCore) -> None:
    engine: EngineThread[Any, str] = EngineThread(core)
    link = engine.attach()
    events = link.events()
    link.send([score_ahead(3), "a"])
    assert [await next_events(events) for _ in range(2)] == [("a",), ("expect [3]",)]
    assert core.steps == [[(link.link_id, "a"), (link.link_id, "expect [3]")]]
    await asyncio.to_thread(engine.close)


async def test_nothing_is_told_of_what_is_to_come_when_something_has_come(
    core: EchoCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = NoChannels()
    engine: EngineThread[Any, str] = EngineThread(core, channels=channels)
    link = engine.attach()
    core.gate.clear()
    link.send(["a"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    link.send([score_ahead(3)])  # alone in its turn: what comes next is not taken with it
    link.send(["b"])
    monkeypatch.setattr(channels, "handle", lambda *_: link.send(["late"]))
    core.gate.set()
    events = link.events()
    found = [(await next_events(events))[0] for _ in range(3)]
    assert found == ["a", "b", "late"], "and nothing of what is expected"
    await asyncio.to_thread(engine.close)


class TidyingCore(EchoCore):
    """Notes how many answers its reader has passed on whenever it tidies."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.num_sent_when_tidied: list[int] = []

    def post_step(self) -> None:
        self.num_sent_when_tidied.append(len(self.sent))


async def test_answers_leave_before_what_they_do_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "LONGEST_DELIVERY_S", DEADLINE_S)
    core = TidyingCore()
    engine: EngineThread[str, str] = EngineThread(core)
    link = engine.attach()

    async def send_on() -> None:
        async for batch in link.events():
            core.sent += batch.events

    reading = asyncio.create_task(send_on())
    await asyncio.sleep(0)  # it reads before the first answer
    try:
        for number in range(1, 6):
            link.send([str(number)])
            async with asyncio.timeout(DEADLINE_S):
                while len(core.num_sent_when_tidied) < number:
                    await asyncio.sleep(0.001)
        assert core.num_sent_when_tidied == [1, 2, 3, 4, 5]
    finally:
        await link.close()
        await reading
        await asyncio.to_thread(engine.close)


async def test_a_reader_that_is_behind_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "LONGEST_DELIVERY_S", 100 * DEADLINE_S)
    core = TidyingCore()
    engine: EngineThread[str, str] = EngineThread(core)
    link = engine.attach()
    events = link.events()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # it has read all there is
    try:
        for number in range(1, 4):
            link.send([str(number)])  # ends the wait for the answer before it, which nobody passes on
        assert (await asyncio.wait_for(waiting, DEADLINE_S)).events
        async with asyncio.timeout(DEADLINE_S):
            while sum(map(len, core.steps)) < 3:
                await asyncio.sleep(0.001)
    finally:
        await asyncio.wait_for(asyncio.to_thread(engine.close), DEADLINE_S)


# Stalls.


@contextlib.asynccontextmanager
async def watched(core: EchoCore) -> AsyncIterator[EngineThread[str, str]]:
    """A thread that counts as hung at once when it makes no progress."""
    engine: EngineThread[str, str] = EngineThread(core, hang_timeout_s=0.01)
    yield engine
    core.gate.set()
    await asyncio.to_thread(engine.close)


async def until_hang(thread: EngineThread[str, str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not thread.stall.is_hang:
            await asyncio.sleep(0.001)


async def test_a_step_that_does_not_end_is_a_hang(core: EchoCore) -> None:
    async with watched(core) as thread:
        link = thread.attach()
        core.gate.clear()
        link.send(["a"])
        await until_hang(thread)
        assert link.stall.is_hang
        with pytest.raises(UnavailableError, match="hangs"):
            thread.attach()
        core.gate.set()
        assert await next_events(link.events()) == ("a",)
        async with asyncio.timeout(DEADLINE_S):
            while thread.stall.age_s:  # its turn may not have ended yet
                await asyncio.sleep(0.001)
        await thread.attach().close()


async def test_messages_that_are_not_taken_are_a_hang(core: EchoCore) -> None:
    class StuckCore(EchoCore):
        def post_step(self) -> None:
            self.gate.wait(DEADLINE_S)

    stuck = StuckCore()
    async with watched(stuck) as thread:
        link = thread.attach()
        link.send(["a"])
        assert await next_events(link.events()) == ("a",)
        stuck.gate.clear()
        link.send(["b", "c"])
        await until_hang(thread)


async def test_a_device_that_hangs_while_the_thread_asks_it_is_a_hang() -> None:
    class PollingCore(EchoCore):
        """Steps, and ends no forward."""

        num_polls = 0

        @property
        def has_work(self) -> bool:
            return self.is_computing

        def step(self) -> list[tuple[int, EventBatch[str]]]:
            self.num_polls += 1
            return []

    core = PollingCore()
    core.is_computing = True
    async with watched(core) as thread:
        await until_hang(thread)
        polls = core.num_polls
        async with asyncio.timeout(DEADLINE_S):
            while core.num_polls == polls:  # the thread goes on
                await asyncio.sleep(0)
        assert thread.stall.is_hang
        core.is_computing = False


async def test_an_idle_thread_does_not_hang(core: EchoCore) -> None:
    async with watched(core) as thread:
        link = thread.attach()
        link.send(["a"])
        assert await next_events(link.events()) == ("a",)
        async with asyncio.timeout(DEADLINE_S):
            while thread.stall.age_s:  # its turn may not have ended yet
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)  # several limits
        assert thread.stall.age_s == 0.0


async def test_a_forward_that_is_known_to_be_long_is_waited_for(core: EchoCore) -> None:
    core.longest_forward_s = DEADLINE_S
    async with watched(core) as thread:
        link = thread.attach()
        core.gate.clear()
        link.send(["a"])
        async with asyncio.timeout(DEADLINE_S):
            while thread.stall.age_s < 0.05:
                await asyncio.sleep(0.001)
        assert thread.stall.limit_s > DEADLINE_S
        assert not thread.stall.is_hang
        core.gate.set()


async def test_without_a_timeout_nothing_is_a_hang(core: EchoCore, thread: EngineThread[str, str]) -> None:
    link = thread.attach()
    core.gate.clear()
    link.send(["a"])
    assert await asyncio.to_thread(core.entered.wait, DEADLINE_S)
    assert (thread.stall.age_s, thread.stall.limit_s) == (0.0, 0.0)
