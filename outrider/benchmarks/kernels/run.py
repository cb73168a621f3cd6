"""The kernel benchmark from gate to result: every case is checked, then timed beside the time its bytes take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.benchmarks.engine.floor import measure_device, timed_samples
from outrider.benchmarks.engine.measuring import EngineGateError
from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.kernels.attention import attention_cases
from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace
from outrider.benchmarks.kernels.drafting import drafting_cases
from outrider.benchmarks.kernels.layers import layer_cases
from outrider.benchmarks.kernels.recurrence import recurrence_cases
from outrider.benchmarks.kernels.scoring import scoring_cases
from outrider.benchmarks.samples import median, ratio
from outrider.benchmarks.schema import Label, Result, Series
from outrider.errors import ConfigError
from outrider.model_executor.device_setup import prepare_device

NUM_KERNELS = 27
_IN_A_ROW = 20
"""Goes that one graph holds."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Kernels and sizes to time."""

    num_rows: int = 32
    """Sequences."""
    tokens_per_row: int = 5
    """Tokens per row in a layer's kernels."""
    num_positions: int = 8
    """Scored positions of each sequence."""
    num_samples: int = 20
    num_warmups: int = 3


@torch.inference_mode()
def run_plan(
    plan: KernelPlan, *, device: str, dtype: str, on_done: Callable[[], None] = lambda: None
) -> tuple[Series, ...]:
    """Check and time every kernel.

    ``EngineGateError`` names the kernel whose answer is not the reference's: nothing is timed then.
    """
    place = _place(device, dtype)
    torch.manual_seed(0)
    bandwidth = measure_device(place.device, place.dtype).bytes_per_second
    series = [Series("copy_bandwidth", "TB/s", (bandwidth / 1e12,))]
    for case in _cases(place, plan):
        if not (difference := case.difference()) <= case.tolerance:
            raise EngineGateError(f"{case.name}, {case.size}: differs from the reference by {difference:.3g}")
        samples = _time(case, place.device, plan)
        labels: dict[str, Label] = {
            "size": case.size,
            "num_bytes": case.num_bytes,
            "floor_us": 1e6 * case.num_bytes / bandwidth,
        }
        series.append(Series(case.name, "us", tuple(1e6 * sample for sample in samples), labels))
        on_done()
    return tuple(series)


def to_rows(series: tuple[Series, ...]) -> list[tuple[str, str, float, float, float]]:
    """(kernel, size, median us, floor us, times the floor)."""
    rows = []
    for item in series:
        microseconds = median(item.samples)
        if "floor_us" in item.labels and microseconds is not None:
            floor = float(item.labels["floor_us"])
            rows.append((item.name, str(item.labels["size"]), microseconds, floor, ratio(microseconds, floor) or 0.0))
    return rows


def to_result(series: tuple[Series, ...], plan: KernelPlan, *, name: str, device: str, dtype: str) -> Result:
    """The result to save."""
    return Result(
        kind="kernels",
        name=name,
        created_at=now(),
        environment=describe_environment(device),
        configuration={
            "num_rows": plan.num_rows,
            "tokens_per_row": plan.tokens_per_row,
            "num_positions": plan.num_positions,
            "dtype": dtype,
            "num_threads": torch.get_num_threads(),
        },
        series=series,
    )


def _place(device: str, dtype: str) -> KernelPlace:
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigError("dtype", f"{dtype!r} is not auto, {', '.join(_DTYPES)}")
    prepared = prepare_device(device, dtype, None)
    return KernelPlace(torch.device(device), _DTYPES["bfloat16" if prepared == "auto" else prepared])


def _cases(place: KernelPlace, plan: KernelPlan) -> Iterator[KernelCase]:
    yield from scoring_cases(place, num_rows=plan.num_rows, num_positions=plan.num_positions)
    yield from drafting_cases(place, num_rows=plan.num_rows)
    yield from layer_cases(place, num_rows=plan.num_rows, tokens_per_row=plan.tokens_per_row)
    yield from attention_cases(place, num_rows=plan.num_rows, tokens_per_row=plan.tokens_per_row)
    yield from recurrence_cases(place, num_rows=plan.num_rows, tokens_per_row=plan.tokens_per_row)


def _time(case: KernelCase, device: torch.device, plan: KernelPlan) -> list[float]:
    """Seconds of each go; on a GPU of goes that follow each other in a graph, so that launches are not timed."""
    if device.type != "cuda" or not case.is_capturable:
        turn = iter(range(plan.num_samples + plan.num_warmups))
        return timed_samples(
            lambda: case.work(next(turn)), device, num_samples=plan.num_samples, num_warmups=plan.num_warmups
        )
    for go in range(plan.num_warmups):
        case.work(go)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for go in range(_IN_A_ROW):
            case.work(go)
    samples = timed_samples(graph.replay, device, num_samples=plan.num_samples, num_warmups=1)
    return [sample / _IN_A_ROW for sample in samples]
