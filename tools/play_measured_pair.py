"""Loads of the real coordinator and engine cores on forwards that take the times of a pair measured on a GPU.

    python tools/play_measured_pair.py --pair MeasuredLongContextsH100 --users 64 --prompt-tokens 4000
    python tools/play_measured_pair.py --choices choices.log     # also writes what each choice of draft lengths went by

Without a GPU it shows how draft lengths are chosen: messages, batches, text in chunks and commands that leave before
choices are real, unlike in the simulations of the tests. Models are stand-ins of known cost; target and draft share the
device, so forwards that overlap take longer. All is one process, which adds some 2 ms to a round of 64 sessions.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the measured pairs are the tests'

from outrider.benchmarks.step.stand_in import (
    StandInExecutor,
    StandInJob,
    StandInStep,
    describe_stand_in,
    new_session_table,
    propose,
    score,
)
from outrider.config import CoordinatorSettings
from outrider.demo import TARGET
from outrider.generation import GenerationRequest
from outrider.ports import Extend, Score
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import ExecutorOutput
from outrider.serving.in_process.service import InProcessService
from outrider.serving.session import Session
from outrider.serving.steady.step import SteadyStep
from outrider.types import SamplingParams
from outrider_coordinator.service import Coordinator
from outrider_draft.texts import PlainSequence
from tests.coordinator.speculation import measured_pairs
from tests.coordinator.speculation.simulated_load import H200

_LONGEST_STEP = 16
"""Committed tokens that a step brings at most: more are a text."""
_TEXT_TOKEN_MS = {"target": 0.043, "draft": 0.004}
_EMPTY_MS = {"target": 6.0, "draft": 0.2}
"""Of a forward with nothing but text."""
_SLICE_S = 1e-3


class SharedDevice:
    """A device whose forwards slow each other down."""

    def __init__(self) -> None:
        self._num_active = 0
        self._lock = threading.Lock()

    def compute(self, seconds: float) -> None:
        """Wait for as long as so much work takes beside what others compute."""
        with self._lock:
            self._num_active += 1
        last = time.perf_counter()
        while seconds > 0.0:
            time.sleep(min(max(seconds * self._num_active, 1e-4), _SLICE_S))
            now = time.perf_counter()
            seconds -= (now - last) / self._num_active
            last = now
        with self._lock:
            self._num_active -= 1


class MeasuredExecutor(StandInExecutor[Any, Any]):
    """Answers as a stand-in after the time that the pair takes for the batch."""

    def __init__(self, role: str, pair: H200, device: SharedDevice, acceptance: float) -> None:
        answer = propose if role == "draft" else score
        super().__init__(lambda job: answer(job, acceptance), busy_s=0.0, note=lambda *_: None)
        self._role, self._pair, self.device = role, pair, device
        self._cached: set[int] = set()
        """Hashes of texts that were computed."""

    def begin(self, session: Session[PlainSequence], item: Extend | Score) -> StandInJob[Any]:
        """A text that was computed before costs a page."""
        job = super().begin(session, item)
        num_tokens, num_drafted = len(item.token_ids), len(getattr(item, "draft_token_ids", ()))
        if num_tokens > _LONGEST_STEP:
            key = hash(item.token_ids[:256])
            num_tokens = _LONGEST_STEP + 1 if key in self._cached else num_tokens
            self._cached.add(key)
        job.num_left, job.num_last = max(num_tokens + num_drafted, 1), num_drafted + 1
        return job

    def execute(self, batch: Sequence[tuple[StandInJob[Any], int]]) -> ExecutorOutput[Any]:
        """Compute a batch, texts in parts."""
        steps = [(job, count) for job, count in batch if count == job.num_left <= _LONGEST_STEP]
        num_text = sum(count for _, count in batch) - sum(count for _, count in steps)
        if self._role == "target":
            num_scored, lengths = sum(count for _, count in steps), []
        else:
            num_scored, lengths = len(steps), [job.item.draft_length for job, _ in steps]
        self.device.compute(self._seconds(len(steps), num_scored, lengths, num_text))
        answers: list[Any] = []
        for job, count in batch:
            job.num_left -= count
            answers.append(None if job.num_left else self._answer(job))
        return ExecutorOutput(answers, time.perf_counter_ns())

    def start_columns(self, step: SteadyStep) -> StandInStep:
        """A step of columns, which has no text."""
        lengths = step.draft_lengths.tolist()
        started = super().start_columns(step)
        seconds = self._seconds(len(lengths), len(lengths) + sum(lengths), lengths, 0)
        return MeasuredStep(started.executor, started.step, seconds)

    def _seconds(self, rows: int, num_scored: int, lengths: list[int], num_text: int) -> float:
        if self._role == "target":
            milliseconds = self._pair.target(rows, num_scored) if rows else _EMPTY_MS["target"]
        else:
            drafting = [length for length in lengths if length]
            milliseconds = self._pair.draft(len(drafting), max(drafting)) if drafting else _EMPTY_MS["draft"]
        return (milliseconds + _TEXT_TOKEN_MS[self._role] * num_text) / 1e3


@dataclass(frozen=True, slots=True)
class MeasuredStep(StandInStep):
    """A forward over a step of columns; ``ends`` is how long it takes alone."""

    def finish(self) -> ExecutorOutput[Any]:
        """Compute, then answer all."""
        executor: Any = self.executor
        executor.device.compute(self.ends)
        return ExecutorOutput((), time.perf_counter_ns(), columns=executor.answer_columns(self.step))


def make_service(role: str, pair: H200, device: SharedDevice, acceptance: float) -> InProcessService[Any, Any]:
    """The target or the draft of the pair; both say that they are on one device."""
    core = EngineCore(new_session_table(), MeasuredExecutor(role, pair, device, acceptance))
    longest = pair.most_lacked if role == "draft" and pair.most_lacked < 1_000_000 else 0
    description = replace(describe_stand_in(role), device_id="gpu", longest_prefill=longest)
    return InProcessService(core, description)


async def generate(coordinator: Coordinator, user: int, num_prompt: int, num_output: int, limit: int | None) -> None:
    """One request."""
    request = GenerationRequest(
        prompt_token_ids=tuple((user * 31 + place) % 2048 for place in range(num_prompt)),
        max_tokens=num_output,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
        num_speculative_tokens=limit,
        seed=user,
    )
    async for _ in coordinator.generate_stream(request):
        pass


async def play(pair: H200, acceptance: float, load_size: tuple[int, int, int], runs: int) -> None:
    """A warm-up, then loads with chosen lengths and without drafts in turn; ``load_size`` is users, prompt and output
    tokens of each.
    """
    users, num_prompt, num_output = load_size
    device = SharedDevice()
    target, draft = (make_service(role, pair, device, acceptance) for role in ("target", "draft"))
    settings = {"tokenizer": str(TARGET), "max_running_requests": max(users, 64)}
    coordinator = Coordinator(target, draft, CoordinatorSettings.model_validate(settings))
    await coordinator.start()

    async def load(name: str, count: int, num_tokens: int, limit: int | None = None) -> float:
        began = time.perf_counter()
        each = (generate(coordinator, user, num_prompt, num_tokens, limit) for user in range(count))
        await asyncio.gather(*each)
        seconds = time.perf_counter() - began
        if num_tokens > 1:
            print(f"{name:8} {seconds:6.2f} s, {1e3 * seconds / num_tokens:6.2f} ms a token", flush=True)
        return seconds

    await load("2 users", 2, 64)
    await load("warm-up", users, num_output)
    for _ in range(runs):
        found = []
        for name, limit in (("chosen", None), ("plain", 0)):
            await load(name, users, 1, limit)
            found.append(await load(name, users, num_output, limit))
        print(f"chosen over plain {found[1] / found[0]:.2f}", flush=True)
    await coordinator.close()


def main(
    pair: Annotated[str, typer.Option(help="A class of the tests' measured_pairs.py.")] = "MeasuredLongContextsH100",
    *,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.81,
    users: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 4000,
    output_tokens: Annotated[int, typer.Option(min=2)] = 256,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    choices: Annotated[Path | None, typer.Option(help="File for every choice of draft lengths.")] = None,
) -> None:
    """Play loads of a measured pair."""
    if choices is not None:
        log, handler = logging.getLogger("outrider_coordinator.speculation.policy"), logging.FileHandler(choices, "w")
        handler.setFormatter(_Fields())
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    kind = getattr(measured_pairs, pair, None)
    if kind is None:
        raise typer.BadParameter(f"{pair} is no measured pair", param_hint="--pair")
    asyncio.run(play(kind(), acceptance, (users, prompt_tokens, output_tokens), runs))


class _Fields(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.getMessage()}: {record.__dict__.get('fields', '')}"


if __name__ == "__main__":
    typer.run(main)
