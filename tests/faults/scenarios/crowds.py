"""Many users at once, and readers that never read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.transport.channels import CLIENT_OPTIONS, open_channel
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from outrider.v1.sampling_pb2 import AcceptanceMethod
from tests.faults.readings import metrics_of
from tests.faults.run import Run
from tests.faults.traffic import HANG_S, PLAIN, Manner, Tally, patiently
from tests.faults.watch import watched

_NUM_BESIDE = 4
_LEAVES = Manner(leaves_after=3)
_HURRIES = Manner(timeout_s=2.0)
_NUM_LATE = 4
"""Number of readers that do not read until all are paused: half of them at most."""
_OUTPUT_TOKENS, _TOP = 400, 20
_SHORT_TOKENS, _SHORT_TOP = 160, 100
"""Tokens and logprobs of the short form: more bytes a token fill the windows and buffers with fewer tokens."""
_MOST_MEMORY_MIB = 256
"""Memory that a coordinator may keep of some hundred requests at once."""
_NUM_USERS = 8
_MOST_GROWTH = 1.03
_FAIR = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def crowd(run: Run) -> None:
    """Streams at the same time, as many as are counted, each with a reader of its own; refused ones are tried again."""
    await run.touch_pages()
    tally = Tally()

    async def one(number: int) -> None:
        request = run.catalogue[number % len(run.catalogue)]
        reading = await patiently(run.clients[number % len(run.clients)], request, tally, manner=PLAIN)
        tally.take(reading, run.twins.get(request.number))

    async with watched(run.stack.processes) as histories:
        async with _progress(run, tally):
            await asyncio.gather(*(one(number) for number in range(run.count)))
        await run.note_left_over()
    run.result.add("refused, and came again", tally.num_refused)
    run.note_streams(tally)
    run.note_memory(histories, most_mib=_MOST_MEMORY_MIB)


async def deaf_readers(run: Run) -> None:
    """Readers that do not read, as many as are counted, beside others that do. A few of them read in the end."""
    await run.touch_pages()
    async with watched(run.stack.processes) as histories:
        async with contextlib.AsyncExitStack() as deaf, run.traffic(_NUM_BESIDE) as traffic:
            await traffic.progress()
            address = run.stack.coordinators[0].address
            channels = [await deaf.enter_async_context(_channel(address)) for _ in range(min(20, run.count))]
            num_late = min(_NUM_LATE, run.count // 2)
            twins = await asyncio.gather(*(_read(_unread(run, channels[number], number)) for number in range(num_late)))
            began = time.monotonic()
            calls = [_unread(run, channels[number % len(channels)], number) for number in range(run.count)]
            await traffic.progress()
            await _settled(run, len(calls))
            run.result.add("until all were paused or had ended", time.monotonic() - began, None, "s")
            num_paused = await _num_requests(run, "paused")
            run.say(f"{len(calls)} readers do not read, {num_paused:.0f} are paused")
            await traffic.progress()
            async with asyncio.timeout(HANG_S * num_late):
                late = await asyncio.gather(*(_read(call) for call in calls[:num_late]))
            different = [number for number, tokens in enumerate(late) if tokens != twins[number]]
            await traffic.progress()
            ended_wrong = [call for call in calls[num_late:] if call.done() and await call.code() not in _FAIR]
            for call in calls:
                call.cancel()
        await run.note_left_over()
    run.result.problems += [f"late reader {number} got other tokens" for number in different]
    run.result.add("readers that do not read", run.count)
    run.result.add("of these paused", num_paused)
    run.result.add("late readers different", len(different), 0)
    run.result.add("of these ended by an error", len(ended_wrong), 0)
    run.note_streams(traffic.tally)
    run.note_memory(histories, most_mib=_MOST_MEMORY_MIB)


async def churn(run: Run) -> None:
    """Users that come and go for as many seconds as are counted: cancels, deadlines, slow readers among them."""
    await run.touch_pages()
    manners = (PLAIN, PLAIN, PLAIN, _LEAVES, _HURRIES, Manner(pause_s=0.02))
    async with watched(run.stack.processes) as histories:
        async with run.traffic(_NUM_USERS, manners=manners) as traffic:
            for minute in range(0, run.count, 60):
                await asyncio.sleep(min(60, run.count - minute))
                run.say(f"{traffic.tally.num_streams} streams, {len(traffic.tally.problems())} wrong")
        await run.note_left_over()
    run.result.add("streams left or past their deadline", traffic.tally.num_left)
    run.note_streams(traffic.tally)
    for name, history in histories.items():
        run.result.add(f"memory of {name}, last third over middle third", history.last_over_middle, _MOST_GROWTH)
    run.note_memory(histories)


@contextlib.asynccontextmanager
async def _progress(run: Run, tally: Tally) -> AsyncIterator[None]:
    async def report() -> None:
        while True:
            await asyncio.sleep(10)
            run.say(f"{tally.num_streams} of {run.count} streams, {tally.num_refused} refusals")

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()


def _channel(address: str) -> grpc.aio.Channel:
    """Channel with the windows of the SDK."""
    return open_channel(address, more=CLIENT_OPTIONS)


def _unread(run: Run, channel: grpc.aio.Channel, number: int) -> grpc.aio.UnaryStreamCall[object, object]:
    """A long stream with much to send, whose messages nobody asks for."""
    request = generation_pb2.GenerateRequest(
        prompt_text=f"def f{number}(self):\n",
        max_tokens=_SHORT_TOKENS if run.is_short else _OUTPUT_TOKENS,
        ignore_eos=True,
        seed=number,
        acceptance_method=AcceptanceMethod.ACCEPTANCE_METHOD_COUPLED,
        logprobs=_SHORT_TOP if run.is_short else _TOP,
    )
    call: grpc.aio.UnaryStreamCall[object, object] = GenerationServiceStub(channel).StreamGenerate(request)
    return call


async def _read(call: grpc.aio.UnaryStreamCall[object, object]) -> list[int]:
    """The tokens of a stream that is read to its end."""
    events: list[Any] = [message async for message in call]
    tokens = [token_id for event in events for token_id in event.delta.token_ids]
    assert tokens == list(events[-1].result.token_ids)
    return tokens


async def _settled(run: Run, num_readers: int) -> None:
    """Return when no more requests run or wait than those that are read: the others are paused or have ended."""
    async with asyncio.timeout(60 + 10 * num_readers):
        while await _num_requests(run, "running", "waiting") > _NUM_BESIDE:
            await asyncio.sleep(0.5)


async def _num_requests(run: Run, *states: str) -> float:
    metrics = [await metrics_of(coordinator.metrics_port) or {} for coordinator in run.stack.coordinators]
    return sum(found.get(f"outrider_num_requests_{state}", 0) for found in metrics for state in states)
