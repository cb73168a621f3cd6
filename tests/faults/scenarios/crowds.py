"""Many users at once, and readers that never read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.readings import metrics_of
from tests.faults.run import Run
from tests.faults.traffic import PLAIN, Manner, Tally, patiently
from tests.faults.watch import watched

_NUM_BESIDE = 4
_LEAVES = Manner(leaves_after=3)
_HURRIES = Manner(timeout_s=2.0)
_OUTPUT_TOKENS = 400
_TOP = 20
_MOST_MEMORY_MIB = 256
"""What a coordinator may keep of some hundred requests at once."""
_NUM_USERS = 8
_MOST_GROWTH = 1.03
_FAIR = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def crowd(run: Run) -> None:
    """As many streams at the same time as are counted, each of a reader of its own; who is refused comes again."""
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
    """As many readers that never read as are counted, while others read beside them."""
    await run.touch_pages()
    async with watched(run.stack.processes) as histories:
        async with contextlib.AsyncExitStack() as deaf, run.traffic(_NUM_BESIDE) as traffic:
            await traffic.progress()
            address = run.stack.coordinators[0].address
            channels = [await deaf.enter_async_context(_channel(address)) for _ in range(min(20, run.count))]
            calls = [_unread(channels[number % len(channels)], number) for number in range(run.count)]
            await traffic.progress()
            await _ended(run, len(calls))
            run.say(f"{len(calls)} readers never read")
            await traffic.progress()
            ended_wrong = [call for call in calls if call.done() and await call.code() not in _FAIR]
            for call in calls:
                call.cancel()
        await run.note_left_over()
    run.result.add("readers that never read", run.count)
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
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def _unread(channel: grpc.aio.Channel, number: int) -> grpc.aio.UnaryStreamCall[object, object]:
    """A long stream with much to send, whose messages are never asked for."""
    request = generation_pb2.GenerateRequest(
        prompt_text=f"def f{number}(self):\n",
        max_tokens=_OUTPUT_TOKENS,
        ignore_eos=True,
        seed=number,
        logprobs=_TOP,
    )
    call: grpc.aio.UnaryStreamCall[object, object] = GenerationServiceStub(channel).StreamGenerate(request)
    return call


async def _ended(run: Run, num_readers: int) -> None:
    """Return when no more requests run or wait than those that are read: the others have ended unread."""
    async with asyncio.timeout(60 + 10 * num_readers):
        for coordinator in run.stack.coordinators:
            while await _num_requests(coordinator.metrics_port) > _NUM_BESIDE:
                await asyncio.sleep(0.5)


async def _num_requests(port: int) -> float:
    metrics = await metrics_of(port) or {}
    return metrics.get("outrider_num_requests_running", 0) + metrics.get("outrider_num_requests_waiting", 0)
