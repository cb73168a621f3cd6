"""The engine benchmark from gate to result: a grid of forwards and draft loops, each beside its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.benchmarks.engine.floor import Device, ForwardWork, forward_work, measure_device
from outrider.benchmarks.engine.measuring import (
    GATE_TOKENS,
    GREEDY,
    Case,
    check_against_single_tokens,
    check_draft_loop,
    time_draft_loop,
    time_forward,
    time_forward_on_device,
)
from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.samples import median, ratio
from outrider.benchmarks.schema import Result, Series
from outrider.config import TargetSettings
from outrider.model_executor.device_setup import prepare_device
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.loader.model import LoadFormat, QuantizationName
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import read_model_config
from outrider.types import SamplingParams

FORWARD, ON_DEVICE, DRAFT_LOOP = "forward", "forward_on_device", "draft_loop"
_SHARE_OF_WINDOWS = 4
"""Pages for one that is needed, where layers with a window take pages of their own out of the same memory."""
WITH_STATES, WITH_STATES_ON_DEVICE = "forward_with_states", "forward_with_states_on_device"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Combinations to time."""

    batch_sizes: tuple[int, ...] = (1,)
    num_tokens: tuple[int, ...] = (1, 5)
    """Tokens per row of a forward."""
    contexts: tuple[int, ...] = (256,)
    draft_lengths: tuple[int, ...] = (4,)
    samplings: tuple[SamplingParams, ...] = (GREEDY,)
    """Sampling of the draft loops."""
    longest_contexts: tuple[int, ...] = ()
    """Contexts of the first row of further forwards, whose other rows have the contexts of the grid."""
    layers: tuple[int, ...] = ()
    """Layers whose hidden states each forward is timed with, too."""
    most_tokens: int | None = None
    """Bound on the tokens of a forward; larger forwards are left out."""
    num_samples: int = 20
    num_warmups: int = 3

    @property
    def forwards(self) -> tuple[Case, ...]:
        """The grid of forwards."""
        most = self.most_tokens
        even = [
            case for case in self._grid(self.num_tokens) if most is None or case.batch_size * case.num_tokens <= most
        ]
        uneven = [replace(case, longest_context=longest) for longest in self.longest_contexts for case in even]
        with_states = [replace(case, layers=self.layers) for case in (*even, *uneven) if self.layers]
        return (*even, *uneven, *with_states)

    @property
    def draft_loops(self) -> tuple[Case, ...]:
        """The grid of draft loops."""
        return tuple(
            replace(case, sampling=sampling) for case in self._grid(self.draft_lengths) for sampling in self.samplings
        )

    @property
    def pages_for(self) -> int:
        """Tokens of KV cache that the largest case needs, over all its sequences."""
        longest = max(*self.contexts, 2 * GATE_TOKENS) + max((*self.draft_lengths, 0))
        return max(2, *self.batch_sizes) * longest + max((*self.longest_contexts, 0))

    def _grid(self, counts: tuple[int, ...]) -> tuple[Case, ...]:
        return tuple(
            Case(batch, count, context) for batch in self.batch_sizes for context in self.contexts for count in counts
        )


def run_plan(
    runner: ModelRunner, plan: EnginePlan, *, on_done: Callable[[], None] = lambda: None
) -> tuple[Series, ...]:
    """Time everything; the first two series are what the device can do. `GateError` comes before any figure."""
    check_against_single_tokens(runner)
    if plan.draft_lengths:
        check_draft_loop(runner)
    device = measure_device(runner.device, runner.dtype)
    series = [
        Series("copy_bandwidth", "GB/s", (device.bytes_per_second / 1e9,)),
        Series("matrix_rate", "GFLOP/s", (device.operations_per_second / 1e9,)),
    ]
    for name, cases in ((FORWARD, plan.forwards), (DRAFT_LOOP, plan.draft_loops)):
        for case in cases:
            timer = time_forward if name == FORWARD else time_draft_loop
            seconds = timer(runner, case, num_samples=plan.num_samples, num_warmups=plan.num_warmups)
            floor = floor_seconds(runner, device, name, case)
            series.append(_in_ms(WITH_STATES if case.layers else name, seconds, case, floor))
            if name == FORWARD and runner.device.type == "cuda":
                busy = time_forward_on_device(runner, case, num_samples=plan.num_samples)
                series.append(_in_ms(WITH_STATES_ON_DEVICE if case.layers else ON_DEVICE, busy, case, floor))
            on_done()
    return tuple(series)


def _in_ms(name: str, seconds: list[float], case: Case, floor: float) -> Series:
    return Series(name, "ms", tuple(1e3 * value for value in seconds), _labels(case, floor))


def floor_seconds(runner: ModelRunner, device: Device, name: str, case: Case) -> float:
    """The floor of a case; of a draft loop, the sum over its forwards. Ranks that share a model do a part each."""
    if name == FORWARD:
        alone = device.floor_seconds(_forward_work(runner, case))
    else:
        works = (_work(runner, case.batch_size, 1, case.context + step) for step in range(case.num_tokens))
        alone = sum(map(device.floor_seconds, works))
    return alone / runner.tensor_parallel_size


def _forward_work(runner: ModelRunner, case: Case) -> ForwardWork:
    """Work of all rows; a longer first row adds what its context reads beyond one of the others'."""
    work = _work(runner, case.batch_size, case.num_tokens, case.context)
    if case.longest_context is None:
        return work
    longer, shorter = (_work(runner, 1, case.num_tokens, length) for length in (case.longest_context, case.context))
    return ForwardWork(
        work.num_bytes + longer.num_bytes - shorter.num_bytes,
        work.num_operations + longer.num_operations - shorter.num_operations,
    )


def _work(runner: ModelRunner, batch_size: int, num_tokens: int, context: int) -> ForwardWork:
    return forward_work(
        runner.config,
        runner.dtype,
        batch_size=batch_size,
        num_tokens=num_tokens,
        context=context,
        num_logits=num_tokens,
    )


def _labels(case: Case, floor: float) -> dict[str, str | int | float | bool]:
    sampling = case.sampling
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return {
        **(drawn if sampling != GREEDY else {}),
        "batch_size": case.batch_size,
        "num_tokens": case.num_tokens,
        "context": case.context,
        **({} if case.longest_context is None else {"longest_context": case.longest_context}),
        "floor_ms": 1e3 * floor,
    }


def to_rows(series: tuple[Series, ...]) -> list[tuple[str, int, int, int, float, float, float]]:
    """(what, batch, tokens, context, median ms, floor ms, times the floor) of each timed series."""
    rows = []
    for item in series:
        milliseconds = median(item.samples)
        if "floor_ms" in item.labels and milliseconds is not None:
            labels: dict[str, Any] = item.labels
            floor = float(labels["floor_ms"])
            over = ratio(milliseconds, floor) or 0.0
            case = labels["batch_size"], labels["num_tokens"], labels["context"]
            rows.append((_what(item), *case, milliseconds, floor, over))
    return rows


def _what(item: Series) -> str:
    name = item.name.replace("_", " ")
    if "longest_context" in item.labels:
        name += f", one row of {item.labels['longest_context']}"
    if "temperature" not in item.labels:
        return name
    return f"{name}, T={item.labels['temperature']:g} p={item.labels['top_p']:g} k={item.labels['top_k']}"


def to_result(series: tuple[Series, ...], runner: ModelRunner, *, name: str, configuration: dict[str, Any]) -> Result:
    """The result to save."""
    facts = {
        "architecture": runner.config.architecture,
        "num_layers": runner.config.num_layers,
        "hidden_size": runner.config.hidden_size,
        "vocab_size": runner.config.vocab_size,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "tensor_parallel_size": runner.tensor_parallel_size,
    }
    return Result(
        kind="engine",
        name=name,
        created_at=now(),
        environment=describe_environment(str(runner.device)),
        configuration={**configuration, **facts},
        series=series,
    )


def load(
    folder: Path,
    plan: EnginePlan,
    *,
    device: str,
    dtype: str,
    page_size: int,
    load_format: LoadFormat = "safetensors",
    quantization: QuantizationName = "none",
    num_threads: int | None = None,
    tensor_parallel_size: int = 1,
    one_shot_all_reduce: bool = True,
) -> ModelRunner:
    """The model with just the pages that the plan needs, warmed up as a service's is; to be closed."""
    prepared = prepare_device(device, dtype, num_threads)
    num_pages = -(-plan.pages_for // page_size) + max(2, *plan.batch_sizes)
    if len(set(read_model_config(folder).sliding_windows)) > 1:
        num_pages *= _SHARE_OF_WINDOWS
    if tensor_parallel_size == 1:
        runner = ModelRunner.load(
            folder,
            device=device,
            dtype=prepared,
            page_size=page_size,
            num_pages=num_pages,
            load_format=load_format,
            quantization=quantization,
            drafting=DraftingRules() if plan.draft_lengths else None,
            hidden_state_layers=plan.layers,
        )
    else:
        settings = {"device": device, "dtype": dtype, "page_size": page_size, "num_pages": num_pages}
        sharing = {"tensor_parallel_size": tensor_parallel_size, "one_shot_all_reduce": one_shot_all_reduce}
        rest = {"model": str(folder), "load_format": load_format, "num_threads": num_threads}
        rest["quantization"] = quantization
        rest["hidden_state_layers"] = ",".join(map(str, plan.layers)) or None
        runner = open_runner(TargetSettings.model_validate({**settings, **sharing, **rest}))
    runner.warm_up()
    return runner
