"""Heartbeats: what counts as silence, and links whose other end is stopped, cut off by the network, or merely busy."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc.aio
import pytest

from outrider.errors import UnavailableError
from outrider.ports import Extend, Release, Score
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.stalls import Stall
from outrider.transport import remote, servicers
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.transport.convert.events import target_events_to_proto
from outrider.transport.link import heartbeats, pump, remote_link
from outrider.transport.link.heartbeats import LOOKS, SilenceDetector, SilenceWatch
from outrider.transport.link.versions import METADATA as VERSION
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.v1.link_pb2_grpc import TargetServiceStub
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.support.tcp_proxy import Direction, TcpProxy
from tests.support.toy_process import toy_process
from tests.transport.conftest import Serve
from tests.transport.test_links import PROMPT, Talk, V, opening

ROWS = random_rows(V, seed=1)
EXTEND, SCORE = Extend(1, 2, 0, EMPTY_PREFIX, PROMPT, 1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT)
DEADLINE_S = 240.0
INTERVAL_S = 0.05
TIMEOUT_S = 1.0
ANY_SILENCE = "nothing was received|has received nothing"
"""The last heartbeat may have told of one of ours that was on its way: then either may be noticed first."""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def port_of(server: Any) -> int:
    return int(server.address.rpartition(":")[2])


# What counts as silence.


def test_silence_is_counted_from_the_last_message() -> None:
    detector = SilenceDetector(3.0, now=100.0)
    looks = [100.0 + detector.period_s * n for n in range(1, LOOKS + 1)]
    assert [detector.look(now) for now in looks] == [False] * (LOOKS - 1) + [True]


def test_a_message_between_two_looks_begins_the_silence_anew() -> None:
    detector = SilenceDetector(1.2, now=0.0)
    for n in range(1, 100):
        assert not detector.look(n * detector.period_s)
        detector.note_received(n * detector.period_s + 0.09)
    received_at = 99 * detector.period_s + 0.09
    assert not detector.look(received_at + 0.15)
    assert not detector.look(received_at + 0.30)
    silences = [0.45, 0.60, 0.75, 0.90, 1.05, 1.25]
    assert [detector.look(received_at + silence) for silence in silences] == [False] * 5 + [True]


def test_a_process_that_was_stopped_does_not_take_its_own_absence_for_silence() -> None:
    detector = SilenceDetector(3.0, now=0.0)
    assert not detector.look(0.25)
    assert not detector.look(3600.0)  # it was stopped for an hour, and has not read what came meanwhile
    detector.note_received(3600.1)
    assert not detector.look(3600.25)


def test_a_loop_that_is_always_late_still_finds_a_dead_peer() -> None:
    """Looks 1 s apart in place of a quarter count for half a second each."""
    detector = SilenceDetector(3.0, now=0.0)
    found = next(now for now in range(1, 100) if detector.look(float(now)))
    assert found == 6


async def test_a_watch_that_is_paused_or_stopped_finds_nobody_silent() -> None:
    silent: list[float] = []
    watch, other = SilenceWatch(0.05, silent.append), SilenceWatch(0.05, silent.append)
    control = SilenceWatch(0.2, silent.append)
    for each in (watch, other, control):
        each.start()
    watch.pause()
    other.stop()
    await eventually(lambda: bool(silent))
    assert silent == [0.2]
    watch.resume()
    await eventually(lambda: len(silent) == 2)
    assert silent == [0.2, 0.05]
    for each in (watch, other, control):
        each.stop()


# Links.


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (heartbeats, pump, remote_link):
        monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", INTERVAL_S)


@pytest.fixture
def impatient_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that give up their coordinators as soon as a coordinator's services are given up here."""
    monkeypatch.setattr(servicers, "silence_timeout_s", lambda context, timeout_s: TIMEOUT_S)


async def attached(remote_target: RemoteTarget) -> Talk:
    """A link with one session, described first as a coordinator does."""
    await remote_target.describe()
    talk = Talk(await remote_target.attach())
    await talk.say(opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT))
    return talk


@pytest.mark.parametrize("directions", [("up",), ("down",), ("up", "down")])
@pytest.mark.parametrize("fault", ["stall", "black_hole"])
async def test_a_link_over_which_nothing_comes_breaks_and_closes_at_once(
    serve: Serve, impatient_services: None, fault: str, directions: tuple[Direction, ...]
) -> None:
    target = ToyTarget(ROWS, V, num_pages=8)
    async with TcpProxy(port_of(await serve("target", target))).running() as proxy:
        talk = await attached(RemoteTarget(proxy.address, link_timeout_s=TIMEOUT_S))
        assert target.num_pages_free < 8
        await getattr(proxy, fault)(*directions)
        # Either end finds the other silent, and with half a connection the one tells the other.
        with pytest.raises(UnavailableError, match=r"nothing was received from|has received nothing|broke"):
            async with asyncio.timeout(DEADLINE_S):
                await talk.hear()
        with pytest.raises(UnavailableError):
            talk.link.send([Score(1, 3, 0, EMPTY_PREFIX, PROMPT)])
        await eventually(lambda: target.num_pages_free == 8)
        async with asyncio.timeout(DEADLINE_S):
            await talk.link.close()


@pytest.mark.parametrize("fault", ["stall", "black_hole"])
async def test_a_link_breaks_when_only_the_way_to_the_service_is_lost(serve: Serve, fault: str) -> None:
    """The service is patient and goes on sending heartbeats; they say that nothing has arrived."""
    async with TcpProxy(port_of(await serve("target", ToyTarget(ROWS, V)))).running() as proxy:
        talk = await attached(RemoteTarget(proxy.address, link_timeout_s=TIMEOUT_S))
        await getattr(proxy, fault)("up")
        with pytest.raises(UnavailableError, match=f"{proxy.address} has received nothing of what was sent to it"):
            async with asyncio.timeout(DEADLINE_S):
                await talk.hear()
        async with asyncio.timeout(DEADLINE_S):
            await talk.link.close()


async def test_a_silent_link_is_not_waited_for_when_it_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "CLOSE_TIMEOUT_S", 1e6)
    async with TcpProxy(port_of(await serve("target", ToyTarget(ROWS, V)))).running() as proxy:
        talk = await attached(RemoteTarget(proxy.address, link_timeout_s=TIMEOUT_S))
        await proxy.black_hole()
        with pytest.raises(UnavailableError, match=ANY_SILENCE):
            await talk.hear()
        async with asyncio.timeout(DEADLINE_S):
            await talk.link.close()


async def test_a_late_answer_of_a_dead_link_is_dropped(serve: Serve) -> None:
    target = ToyTarget(ROWS, V, num_pages=8)
    async with TcpProxy(port_of(await serve("target", target))).running() as proxy:
        port = RemoteTarget(proxy.address, link_timeout_s=TIMEOUT_S)
        talk = await attached(port)
        await proxy.stall("down")
        talk.link.send([Score(1, 3, 0, EMPTY_PREFIX, PROMPT)])
        with pytest.raises(UnavailableError, match=ANY_SILENCE):
            await talk.hear()
        await talk.link.close()
        await proxy.heal()
        again = await attached(port)
        batch = await again.say(Score(1, 4, 0, EMPTY_PREFIX, PROMPT))
        assert [event.generation for event in batch.events] == [4]
        assert [batch async for batch in talk.link.events()] == []
        await again.link.close()
        await eventually(lambda: target.num_pages_free == 8)


async def test_a_service_that_only_sends_heartbeats_stays_attached(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long forward: the worker is busy, the link is not."""
    draft = ToyDraft(ROWS, V)
    port = RemoteDraft((await serve("draft", draft)).address, link_timeout_s=TIMEOUT_S)
    await port.describe()
    talk = Talk(await port.attach())
    draft.faults.hold = True
    talk.link.send([opening(1), Extend(1, 2, 0, EMPTY_PREFIX, PROMPT, 1)])
    hearing = asyncio.create_task(talk.hear())
    looks: list[bool] = []
    look = heartbeats.SilenceDetector.look

    def watched(detector: heartbeats.SilenceDetector, now: float) -> bool:
        is_silent = look(detector, now)
        if detector.timeout_s == TIMEOUT_S:  # of the coordinator's end
            looks.append(is_silent)
        return is_silent

    monkeypatch.setattr(heartbeats.SilenceDetector, "look", watched)
    await eventually(lambda: len(looks) > 3 * LOOKS)
    assert not any(looks)
    assert not hearing.done()
    draft.release_held()
    assert (await hearing).events[0].generation == 2
    await talk.link.close()


@pytest.mark.parametrize(("role", "port", "asking"), [("draft", RemoteDraft, EXTEND), ("target", RemoteTarget, SCORE)])
async def test_heartbeats_say_how_many_pages_are_free_after_the_last_forward(
    serve: Serve, role: str, port: Any, asking: Any
) -> None:
    toy: Any = {"draft": ToyDraft, "target": ToyTarget}[role](ROWS, V, num_pages=8)
    talk = Talk(await port((await serve(role, toy)).address).attach())
    hearing = await talk.say(opening(1), asking)
    assert hearing.report is not None
    assert talk.link.num_pages_free == hearing.report.num_pages_free < 8
    talk.link.send([Release(1, 9)])  # no forward, so no report
    reading = asyncio.create_task(talk.hear())
    await eventually(lambda: talk.link.num_pages_free == 8)
    reading.cancel()
    await talk.link.close()


@pytest.mark.parametrize(("role", "port", "asking"), [("draft", RemoteDraft, EXTEND), ("target", RemoteTarget, SCORE)])
async def test_a_service_that_says_it_hangs_loses_its_links(serve: Serve, role: str, port: Any, asking: Any) -> None:
    toy: Any = {"draft": ToyDraft, "target": ToyTarget}[role](ROWS, V)
    toy.faults.hold = True
    talk = Talk(await port((await serve(role, toy)).address).attach())
    talk.link.send([opening(1), asking])
    hearing = asyncio.create_task(talk.hear())
    for stall in (Stall(9.5, 10.0), Stall(9.5, 0.0), Stall(9.5, 20.0), Stall(0.0, 10.0)):  # none of them a hang
        toy.faults.stall = stall
        await eventually(partial(_says, talk, stall))
    toy.faults.stall = Stall(9.5, 4_000_000.0)  # no claim holds for more than an hour
    await eventually(partial(_says, talk, Stall(9.5, 3600.0)))
    assert not hearing.done()
    toy.faults.stall = Stall(10.5, 10.0)
    with pytest.raises(UnavailableError, match=r"hangs: no progress with its work for 10\.5 s"):
        await hearing
    with pytest.raises(UnavailableError, match="hangs"):
        talk.link.send([asking])
    await talk.link.close()


def _says(talk: Talk, stall: Stall) -> bool:
    return bool(talk.link.stall == stall)


async def test_a_service_that_announces_no_heartbeats_may_be_silent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one. Another link over the same time, to one that announces them, is found dead."""
    server = await serve("target", ToyTarget(ROWS, V))
    monkeypatch.setattr(pump, "HEARTBEAT_INTERVAL_S", 1e6)
    control = await attached(RemoteTarget(server.address, link_timeout_s=2 * TIMEOUT_S))
    monkeypatch.setattr(servicers, "with_heartbeats", lambda description: description)
    talk = await attached(RemoteTarget(server.address, link_timeout_s=TIMEOUT_S))
    hearing = asyncio.create_task(talk.hear())
    with pytest.raises(UnavailableError, match="nothing was received"):
        await control.hear()
    assert not hearing.done()
    talk.link.send([Score(1, 3, 0, EMPTY_PREFIX, PROMPT)])
    assert (await hearing).events[0].generation == 3
    for each in (talk, control):
        await each.link.close()


async def test_a_silent_call_that_takes_no_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "LAST_WRITE_S", INTERVAL_S)
    target = ToyTarget(ROWS, V, num_pages=8)
    link_pump = pump.LinkPump(
        await target.attach(),
        target_commands_from_proto,
        target_events_to_proto,
        max_message_bytes=1 << 20,
        silence_timeout_s=TIMEOUT_S,
    )

    async def incoming() -> AsyncIterator[Any]:
        yield target_commands_to_proto([opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT)])
        await asyncio.Event().wait()

    async def call() -> None:
        async with contextlib.aclosing(link_pump.run(incoming())) as messages:
            async for _ in messages:
                await asyncio.Event().wait()  # as gRPC does while the caller takes no byte

    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.create_task(call())
    assert target.num_pages_free == 8


async def test_a_coordinator_that_announces_no_heartbeats_may_be_silent_for_longer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence ends at last: a link whose message never ends would hold what has come of it."""
    timeouts: list[float] = []
    find = servicers.silence_timeout_s

    def found(context: Any, timeout_s: float) -> float:
        timeouts.append(find(context, timeout_s))
        return timeouts[-1]

    monkeypatch.setattr(servicers, "silence_timeout_s", found)
    server = await serve("target", ToyTarget(ROWS, V))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = TargetServiceStub(channel).Attach(metadata=[VERSION])
        await call.write(target_commands_to_proto([opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT)]))
        async with asyncio.timeout(DEADLINE_S):
            kinds = [(await call.read()).HasField("heartbeat") for _ in range(5)]
        assert kinds == [False, True, True, True, True]
        call.cancel()
    talk = Talk(await RemoteTarget(server.address).attach())
    await talk.say(opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT))
    await talk.link.close()
    assert timeouts == [heartbeats.UNANNOUNCED_TIMEOUT_S, heartbeats.DEFAULT_COORDINATOR_TIMEOUT_S]


async def test_links_that_end_while_a_heartbeat_is_on_its_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pump, "HEARTBEAT_INTERVAL_S", 0)
    # gRPC tells a client that writes while its call ends of an internal error, not of the call's status.
    monkeypatch.setattr(remote_link, "HEARTBEAT_INTERVAL_S", 1e6)
    target = ToyTarget(ROWS, V, num_pages=8)
    async with TcpProxy(port_of(await serve("target", target))).running() as proxy:
        for turn in range(30):
            talk = await attached(RemoteTarget(proxy.address, link_timeout_s=DEADLINE_S))
            for generation in range(3, 3 + turn):
                await talk.say(Score(1, generation, 0, EMPTY_PREFIX, PROMPT))
            if turn % 3 == 0:
                target.break_links()
                with pytest.raises(UnavailableError, match="broken as told"):
                    await talk.hear()
            elif turn % 3 == 1:
                proxy.cut()
            await talk.link.close()
            await eventually(lambda: target.num_pages_free == 8)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Processes.


async def test_a_process_that_is_stopped_is_found_dead_and_taken_back() -> None:
    async with toy_process("target") as process:
        talk = await attached(RemoteTarget(process.address, link_timeout_s=3 * TIMEOUT_S))
        process.signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=ANY_SILENCE):
            async with asyncio.timeout(DEADLINE_S):
                await talk.hear()
        await talk.link.close()
        process.signal(signal.SIGCONT)
        again = await attached(RemoteTarget(process.address, connect_timeout_s=DEADLINE_S, link_timeout_s=DEADLINE_S))
        await again.link.close()


async def test_a_coordinator_whose_own_loop_was_blocked_finds_nobody_dead() -> None:
    async with toy_process("target") as process:
        timeout_s = 2 * TIMEOUT_S
        talk = await attached(RemoteTarget(process.address, link_timeout_s=timeout_s))
        for generation in range(3, 5):
            hearing = asyncio.create_task(talk.hear())
            await asyncio.sleep(0)
            time.sleep(1.25 * timeout_s)
            talk.link.send([Score(1, generation, 0, EMPTY_PREFIX, PROMPT)])
            assert (await hearing).events[0].generation == generation
        await talk.link.close()


async def test_a_connection_whose_first_bytes_were_lost_is_begun_anew(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_ATTEMPT_S", 0.2)
    async with TcpProxy(port_of(await serve("target", ToyTarget(ROWS, V)))).running() as proxy:
        port = RemoteTarget(proxy.address, connect_timeout_s=DEADLINE_S)
        await proxy.black_hole()
        describing = asyncio.create_task(port.describe())
        await eventually(lambda: proxy.num_accepted >= 3)
        await proxy.heal()
        async with asyncio.timeout(DEADLINE_S):
            try:
                description = await describing
            except UnavailableError:  # healed between the two directions: the server never saw how this one began
                description = await port.describe()
        assert description.role == "target"
