"""Requests to a coordinator beside services that lie: which came out right, and how long a stream had to wait.

``python -m tests.faults.fuzzing.traffic_beside_liars draft | target --answers N --seed S``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from outrider.config import CoordinatorSettings
from outrider.errors import OutriderError
from outrider.generation import GenerationRequest
from outrider.transport.convert.generation import info_to_proto
from outrider.transport.server import Server, serve_draft, serve_target
from outrider.types import AcceptanceMethod, SamplingParams
from outrider_coordinator.__main__ import _coordinator
from outrider_coordinator.service import Coordinator
from tests.faults.fuzzing.lying import Liar, LyingProxy
from tests.support.scripted_ports import ToyDraft, ToyTarget
from tests.support.toy_language import Rows

LENGTH = 24
NUM_PROMPTS = 12
NUM_CLIENTS = 32
SHARE = 0.2
"""Share of the messages that are lies."""
VOCAB_SIZE = 40
_PATIENCE_S = 60.0
"""Timeout of a request whose target may never answer; a busy machine is slow."""
_SEED = 7
_LOOK_S = 0.05
_METHODS = (AcceptanceMethod.COUPLED, AcceptanceMethod.REJECTION, AcceptanceMethod.TYPICAL)


def few_rows(*, seed: int, num_contexts: int = 16) -> Rows:
    """A language with few different rows, which takes no time."""

    @functools.cache
    def row(context: int) -> np.ndarray:
        weights = np.exp(4 * np.random.default_rng([seed, context]).standard_normal(VOCAB_SIZE))
        return np.asarray(weights / weights.sum())

    return lambda tokens: row(sum(tokens[-2:]) % num_contexts)


@dataclass(slots=True)
class Outcome:
    """Results of a run."""

    num_answers: int = 0
    num_lies: int = 0
    num_checked: int = 0
    """Greedy and coupled requests that no lying target took part in."""
    num_wrong: int = 0
    """Number of wrong ones among these; a lying draft is no excuse."""
    num_failed: int = 0
    """Requests without a lying target that failed."""
    longest_gap_s: float = 0.0
    """Longest gap between tokens of requests that no liar took part in."""
    longest_gap_with_lying_draft_s: float = 0.0
    """Longest gap of requests that waited for a lying draft: up to ``draft_timeout_ms``."""
    endings: dict[str, int] = field(default_factory=dict)


def requests() -> list[GenerationRequest]:
    """Each prompt greedy, coupled, and by rejection and typical acceptance."""
    made = []
    for number in range(NUM_PROMPTS):
        prompt = (number % VOCAB_SIZE, 3, number * 7 % VOCAB_SIZE, 5)
        made.append(_request(prompt, SamplingParams(temperature=0), AcceptanceMethod.COUPLED))
        for method in _METHODS:
            sampling = SamplingParams(temperature=1.0, top_p=0.9 if number % 2 else 1.0)
            made.append(_request(prompt, sampling, method))
    return made


def _request(prompt: tuple[int, ...], sampling: SamplingParams, method: AcceptanceMethod) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, max_tokens=LENGTH, sampling=sampling, acceptance_method=method, seed=_SEED
    )


def is_checked(request: GenerationRequest) -> bool:
    """True if the output is the same with every draft."""
    return request.sampling.temperature == 0 or request.acceptance_method is AcceptanceMethod.COUPLED


async def read(coordinator: Coordinator, request: GenerationRequest, gaps: list[float]) -> list[int]:
    """The tokens of a request; ``gaps`` gets the times between them."""
    found: list[int] = []
    last = time.monotonic()
    async with contextlib.aclosing(coordinator.generate_stream(request)) as deltas:
        async for delta in deltas:
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            found += delta.token_ids
    return found


async def references(rows: Rows) -> dict[GenerationRequest, list[int]]:
    """Output of an honest target alone."""
    coordinator = Coordinator(ToyTarget(rows, VOCAB_SIZE), None, CoordinatorSettings.model_validate({}))
    await coordinator.start()
    try:
        return {each: await read(coordinator, each, []) for each in requests() if is_checked(each)}
    finally:
        await coordinator.close()


class Run:
    """One run: a coordinator with an honest target and an honest draft, and a lying draft or target beside them."""

    def __init__(self, role: str, seed: int, num_answers: int, *, drops: bool = False, max_s: float = math.inf) -> None:
        self.outcome = Outcome()
        self._role, self._num_answers, self._seed = role, num_answers, seed
        self._rows = few_rows(seed=1)
        self._liar = Liar(role, seed, share=SHARE, drops=drops)
        self._number = 0
        self._until = time.monotonic() + max_s

    async def run(self) -> Outcome:
        """Run until the liar has sent this many answers."""
        expected = await references(self._rows)
        await self._play(expected)
        return self.outcome

    async def _play(self, expected: dict[GenerationRequest, list[int]]) -> None:
        async with self._coordinator() as coordinator:
            rngs = [random.Random(f"{self._seed} {number}") for number in range(NUM_CLIENTS)]
            looking = asyncio.create_task(self._look(coordinator))
            await asyncio.gather(*(self._client(coordinator, expected, rng) for rng in rngs))
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self.outcome.num_answers, self.outcome.num_lies = self._liar.num_answers, self._liar.num_lies

    @contextlib.asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[Coordinator]:
        honest_target, honest_draft = ToyTarget(self._rows, VOCAB_SIZE), ToyDraft(self._rows, VOCAB_SIZE)
        servers = [
            await serve_target(honest_target, host="127.0.0.1", port=0),
            await serve_draft(honest_draft, host="127.0.0.1", port=0),
            await self._serve_second(),
        ]
        for server in servers:
            await server.set_serving(True)
        addresses = [server.address for server in servers]
        try:
            async with LyingProxy(addresses[2], self._liar).running() as proxy:
                both = {"target": addresses[0], "draft": addresses[1]}
                both[self._role] += f",{proxy.address}"
                named = {"target_address": both["target"], "draft_address": both["draft"], "draft_length": "fixed"}
                coordinator = _coordinator(CoordinatorSettings.model_validate(named), lambda is_up: None, None)
                await coordinator.start()
                try:
                    yield coordinator
                finally:
                    await coordinator.close()
        finally:
            for server in servers:
                await server.stop()

    async def _serve_second(self) -> Server:
        """The service that lies, before its answers are changed."""
        if self._role == "target":
            return await serve_target(ToyTarget(self._rows, VOCAB_SIZE), host="127.0.0.1", port=0)
        return await serve_draft(ToyDraft(self._rows, VOCAB_SIZE), host="127.0.0.1", port=0)

    async def _client(
        self, coordinator: Coordinator, expected: dict[GenerationRequest, list[int]], rng: random.Random
    ) -> None:
        choices = requests()
        while self._liar.num_answers < self._num_answers and time.monotonic() < self._until:
            await self._ask(coordinator, rng.choice(choices), expected)

    async def _look(self, coordinator: Coordinator) -> None:
        """Ask for what the coordinator tells of its services; an error counts as a failure."""
        while True:
            try:
                info_to_proto(await coordinator.model_info())
                coordinator.readings()
            except Exception as error:
                self._count(f"info: {type(error).__name__}")
                self.outcome.num_failed += 1
            await asyncio.sleep(_LOOK_S)

    def _count(self, ending: str) -> None:
        self.outcome.endings[ending] = self.outcome.endings.get(ending, 0) + 1

    async def _ask(
        self, coordinator: Coordinator, request: GenerationRequest, expected: dict[GenerationRequest, list[int]]
    ) -> None:
        self._number += 1
        name, gaps, ending, found = f"request-{self._number}", list[float](), "ended", list[int]()
        named = replace(request, request_id=name)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await read(coordinator, named, gaps)
        except (OutriderError, TimeoutError) as error:
            ending = type(error).__name__
        is_lied_to = name in self._liar.seen_requests
        self._count(f"lying {self._role}: {ending}" if is_lied_to else ending)
        if is_lied_to and self._role == "target":
            return
        self.outcome.num_failed += ending != "ended"
        if is_lied_to:
            self.outcome.longest_gap_with_lying_draft_s = max(self.outcome.longest_gap_with_lying_draft_s, *gaps, 0.0)
        else:
            self.outcome.longest_gap_s = max(self.outcome.longest_gap_s, *gaps, 0.0)
        if is_checked(request):
            self.outcome.num_checked += 1
            self.outcome.num_wrong += ending == "ended" and found != expected[request]


def main() -> None:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzzing.traffic_beside_liars")
    parser.add_argument("role", choices=("draft", "target"))
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long, however many answers")
    parser.add_argument("--drops", action="store_true", help="some answers never come")
    options = parser.parse_args()
    run = Run(options.role, options.seed, options.answers, drops=options.drops, max_s=options.seconds)
    sys.stdout.write(json.dumps(asdict(asyncio.run(run.run()))) + "\n")


if __name__ == "__main__":
    main()
