"""Streams that run while faults happen: so many at a time, each compared with its twin when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.errors import CapacityError, DeadlineError, OutriderError
from outrider.generation import Delta, GenerationResult
from tests.faults.oracle import Reading, differences
from tests.faults.requests import Request

HANG_S = 150.0
"""Time without output after which a stream counts as hung; before its first output, when no other has any either. A
request may wait `target_timeout_s` for a lost target.
"""
REST_S = 1.0
_KEPT_GAPS = 2000
_MOST_TRIES = 200
"""Tries in a row, with no output of any stream in between."""


class Streams(Protocol):
    """Client of the traffic."""

    @property
    def stream(self) -> Callable[..., AsyncGenerator[Delta, None]]:
        """Begin one stream."""
        ...


@dataclass(slots=True)
class Tally:
    """Results of the streams of one run."""

    num_streams: int = 0
    num_outputs: int = 0
    """Deltas so far, those of running streams included."""
    num_tokens: int = 0
    num_left: int = 0
    num_refused: int = 0
    different: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    longest_first_s: float = 0.0
    """The longest wait of any stream for its first output, refusals aside."""
    longest_gaps: list[tuple[float, float, int]] = field(default_factory=list)
    """(seconds, clock at the end, request), a heap of the longest waits of a stream between outputs."""

    def take(self, reading: Reading, twin: GenerationResult | None) -> None:
        """Judge one stream that has ended, however it did."""
        name = str(reading.request)
        self.num_streams += 1
        self.num_tokens += len(reading.token_ids)
        self.num_left += reading.was_left
        if found := differences(reading, twin):
            self.different.append(f"{'; '.join(found)} in {name}")
        if reading.is_hung:
            self.hung.append(f"nothing for {HANG_S:.0f} s after {len(reading.token_ids)} tokens of {name}")
        elif reading.error is not None:
            self.failed.append(f"{type(reading.error).__name__}: {reading.error} in {name}")
        self.longest_first_s = max(self.longest_first_s, reading.first_output_s)
        for gap, clock in reading.gaps:
            heapq.heappush(self.longest_gaps, (gap, clock, reading.request.number))
        while len(self.longest_gaps) > _KEPT_GAPS:
            heapq.heappop(self.longest_gaps)

    def problems(self) -> list[str]:
        """Problems that may never occur."""
        return [*self.different, *self.failed, *self.hung]


@dataclass(frozen=True, slots=True)
class Manner:
    """Behaviour of a reader."""

    leaves_after: int | None = None
    """Deltas after which the user goes away."""
    timeout_s: float | None = None
    """Deadline of the request."""
    pause_s: float = 0.0
    """Pause after each delta before the user asks for the next."""


PLAIN = Manner()


async def read(
    client: Streams, request: Request, tally: Tally, *, manner: Manner = PLAIN, hang_s: float = HANG_S, **options: Any
) -> Reading:
    """Read one stream to its end, or as far as the reader's manner goes; ``tally`` counts outputs as they come."""
    reading = Reading(request)
    deadline = {} if manner.timeout_s is None else {"timeout": manner.timeout_s}
    stream = client.stream(**{**request.options, **deadline, **options})
    try:
        await _follow(stream, reading, tally, manner, hang_s)
    except TimeoutError:
        reading.is_hung = True
    except DeadlineError as error:
        reading.was_left = manner.timeout_s is not None
        reading.error = None if reading.was_left else error
    except OutriderError as error:
        reading.error = error
    finally:
        with contextlib.suppress(TimeoutError, OutriderError):
            await asyncio.wait_for(stream.aclose(), hang_s)
    return reading


async def _follow(
    stream: AsyncGenerator[Delta, None], reading: Reading, tally: Tally, manner: Manner, hang_s: float
) -> None:
    asked = time.monotonic()
    for number in itertools.count(1):
        try:
            delta = await (_first(stream, tally, hang_s) if number == 1 else asyncio.wait_for(anext(stream), hang_s))
        except StopAsyncIteration:
            return
        _note_gap(reading, asked)
        tally.num_outputs += 1
        reading.token_ids += delta.token_ids
        reading.texts.append(delta.text)
        reading.logprobs += delta.logprobs or ()
        reading.result = delta.result or reading.result
        if number == manner.leaves_after and delta.result is None:
            reading.was_left = True
            return
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
        asked = time.monotonic()


async def _first(stream: AsyncGenerator[Delta, None], tally: Tally, hang_s: float) -> Delta:
    """The first delta; ``TimeoutError`` when neither it nor any other stream's output came for ``hang_s``: one that
    waits for its place behind hundreds of others does not hang, however slow the machine is.
    """
    waiting = asyncio.ensure_future(anext(stream))
    try:
        while not waiting.done():
            before = tally.num_outputs
            await asyncio.wait([waiting], timeout=hang_s)
            if not waiting.done() and tally.num_outputs == before:
                raise TimeoutError
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


def _note_gap(reading: Reading, since: float) -> None:
    now = time.monotonic()
    if not reading.texts:
        reading.first_output_s = now - since
        return
    reading.gaps = heapq.nlargest(3, [*reading.gaps, (now - since, now)])


class Traffic:
    """``num_streams`` streams at a time, as an async context manager; on leaving it the running ones finish."""

    def __init__(
        self,
        clients: Sequence[Streams],
        catalogue: Sequence[Request],
        twins: Mapping[int, GenerationResult],
        *,
        num_streams: int,
        rng: random.Random,
        options: Mapping[str, Any] | None = None,
        manners: Sequence[Manner] = (PLAIN,),
    ) -> None:
        self.tally = Tally()
        self.rests = False
        """True while each user rests for ``REST_S`` after a stream."""
        self._clients, self._catalogue, self._twins = clients, catalogue, twins
        self._options = dict(options or {})
        self._manners = manners
        self._seeds = [rng.getrandbits(64) for _ in range(num_streams)]
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [
            asyncio.create_task(self._run(random.Random(seed), place)) for place, seed in enumerate(self._seeds)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        if error[0] is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error[0] is None:
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def progress(self, deadline_s: float = HANG_S) -> None:
        """Return when as many outputs have come from now on as there are streams: the run goes on."""
        wanted = self.tally.num_outputs + len(self._tasks)
        async with asyncio.timeout(deadline_s):
            while self.tally.num_outputs < wanted:
                await asyncio.sleep(0.02)

    async def _run(self, rng: random.Random, place: int) -> None:
        client = self._clients[place % len(self._clients)]
        while not self._is_over:
            request, manner = rng.choice(self._catalogue), rng.choice(self._manners)
            reading = await patiently(client, request, self.tally, manner=manner, **self._options)
            self.tally.take(reading, self._twins.get(request.number))
            if self.rests:
                await asyncio.sleep(REST_S)


async def patiently(
    client: Streams, request: Request, tally: Tally, *, manner: Manner = PLAIN, **options: Any
) -> Reading:
    """``read``, again while the service is full and others go on: a refusal with a time to come again is no failure."""
    num_tries, before = 0, -1
    while True:
        reading = await read(client, request, tally, manner=manner, **options)
        if not isinstance(reading.error, CapacityError) or reading.token_ids:
            return reading
        num_tries = num_tries + 1 if tally.num_outputs == before else 0
        before = tally.num_outputs
        if num_tries == _MOST_TRIES:
            return reading
        tally.num_refused += 1
        await asyncio.sleep(reading.error.retry_after_ms / 1000)
