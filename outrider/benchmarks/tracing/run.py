"""Times steps with tracing off, on for others, and on, in turn; then what making and exporting the spans takes.

A step's cost of tracing is the median of what it takes with it less the median without, in the same round: what else
the machine does falls on all three alike. Spans are made while nothing is timed, from what was noted in the loops.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.schema import Label, Result, Series
from outrider.benchmarks.tracing.rig import Rig, TracedStepTimes, Tracings
from outrider.errors import ConfigError, IntegrityError, install_command
from outrider.telemetry.tracing import TraceContext, names
from outrider.telemetry.tracing.context import new_span_id, new_trace_id
from outrider.telemetry.tracing.pipeline import Pipeline, resource_of
from outrider.telemetry.tracing.service_spans import ServiceRecorder


class DiscardingExporter(SpanExporter):
    """Counts what it drops."""

    def __init__(self) -> None:
        self.num_spans: Counter[str] = Counter()
        """Number of spans by name."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode them."""
        self.num_spans.update(span.name for span in spans)
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def make_pipeline(exporter: DiscardingExporter) -> Pipeline:
    """A pipeline of the usual size."""
    provider = TracerProvider(resource=resource_of("benchmark", {}), shutdown_on_exit=False)
    return Pipeline(provider, [exporter], {})


if TYPE_CHECKING:
    from outrider.telemetry.tracing.pipeline import Pipeline
    from outrider.telemetry.tracing.span import Span

OFF, NOT_SAMPLED, SAMPLED = "off", "not sampled", "sampled"
ARMS = (OFF, NOT_SAMPLED, SAMPLED)
PLACES = ("coordinator", "target", "draft")
MAKING = "making and exporting spans"


@dataclass(frozen=True, slots=True)
class TracingPlan:
    """Numbers of rounds and steps to time."""

    num_steps: int = 256
    """Steps of each request; a step of each arm in turn."""
    num_rounds: int = 20
    """Each with new requests; the first is not counted."""


def run_plan(plan: TracingPlan, *, on_done: Callable[[], None] = lambda: None) -> tuple[Series, ...]:
    """Microseconds a step: one sample a round."""
    rounds: list[dict[tuple[str, str], float]] = []
    for _ in range(plan.num_rounds + 1):
        rounds.append(_round(plan.num_steps))
        on_done()
    return tuple(
        Series(name, "us", tuple(found[name, arm] for found in rounds[1:]), {"arm": arm}) for name, arm in rounds[0]
    )


def _round(num_steps: int) -> dict[tuple[str, str], float]:
    with _held_pipeline() as (pipeline, release, num_spans):
        tracings = Tracings(pipeline, ServiceRecorder(pipeline, "target"), ServiceRecorder(pipeline, "draft"))
        rigs = {
            arm: Rig(
                Tracings() if arm == OFF else tracings, caller=_caller(is_sampled=arm == SAMPLED), num_steps=num_steps
            )
            for arm in ARMS
        }
        costs = _time_steps(rigs, num_steps)
        rigs[SAMPLED].end()
        began = time.process_time()
        release()
        making = time.process_time() - began
        _require_spans(num_spans(), num_steps)
    found = {
        (place, arm): 1e6 * statistics.median(getattr(cost, place) for cost in costs[arm])
        for place in PLACES
        for arm in ARMS
    }
    return {**found, (MAKING, SAMPLED): 1e6 * making / num_steps}


def _require_spans(num_spans: Mapping[str, int], num_steps: int) -> None:
    """``IntegrityError`` when a sampled step has left none in one of the places: tracing was not what was measured."""
    for place, name in zip(PLACES, (names.ACCEPT, names.SCORE_ITEM, names.PROPOSE_ITEM), strict=True):
        if num_spans.get(name, 0) < num_steps - 1:  # the prefill may have none
            raise IntegrityError(f"{num_steps} sampled steps left {num_spans.get(name, 0)} spans of the {place}")


def _time_steps(rigs: dict[str, Rig], num_steps: int) -> dict[str, list[TracedStepTimes]]:
    costs: dict[str, list[TracedStepTimes]] = {arm: [] for arm in rigs}
    for number in range(num_steps - 1):  # the prefill was one
        # Who comes first is another each time: the one after a longer step finds less in the processor's caches.
        for index in range(len(ARMS)):
            arm = ARMS[(number + index) % len(ARMS)]
            costs[arm].append(rigs[arm].step())
    return costs


@contextmanager
def _held_pipeline() -> Iterator[tuple[Pipeline, Callable[[], None], Callable[[], Mapping[str, int]]]]:
    """A process's own way out for spans, whose thread waits until it is let go; then all are exported and counted."""
    try:
        from outrider.benchmarks.tracing.run import DiscardingExporter, make_pipeline
    except ModuleNotFoundError as error:
        raise ConfigError("", f"this benchmark needs OpenTelemetry: {install_command('telemetry')}") from error
    gate = threading.Event()

    def wait() -> Iterable[Span]:
        gate.wait()
        return ()

    def release() -> None:
        gate.set()
        pipeline.close()

    exporter = DiscardingExporter()
    pipeline = make_pipeline(exporter)
    pipeline.emit(wait)
    try:
        yield pipeline, release, lambda: exporter.num_spans
    finally:
        release()


def _caller(*, is_sampled: bool) -> str:
    return TraceContext(new_trace_id(), new_span_id(), is_sampled).trace_parent


def to_rows(series: Sequence[Series]) -> list[tuple[Label, ...]]:
    """(where, off, what it adds when others are sampled, what it adds when it is itself), microseconds a step."""
    medians = {(item.name, item.labels["arm"]): item.statistics.median for item in series if item.statistics}
    rows: list[tuple[Label, ...]] = [
        (place, medians[place, OFF], added_us(series, place, NOT_SAMPLED), added_us(series, place, SAMPLED))
        for place in PLACES
    ]
    return [*rows, (MAKING, "", "", medians[MAKING, SAMPLED])]


def added_us(series: Sequence[Series], place: str, arm: str) -> float:
    """Overhead of an arm over no tracing: median over the rounds of the differences within a round."""
    found = {item.labels["arm"]: item.samples for item in series if item.name == place}
    return statistics.median(more - less for more, less in zip(found[arm], found[OFF], strict=True))


def to_result(series: Sequence[Series], plan: TracingPlan, *, name: str) -> Result:
    """The result to save."""
    figures = {arm: {place: added_us(series, place, arm) for place in PLACES} for arm in (NOT_SAMPLED, SAMPLED)}
    configuration: dict[str, Any] = {
        "num_steps": plan.num_steps,
        "num_rounds": plan.num_rounds,
        "models": "stand-ins that take no time, in one thread",
    }
    return Result(
        kind="tracing",
        name=name,
        created_at=now(),
        environment=describe_environment("cpu"),
        configuration=configuration,
        series=tuple(series),
        figures={"added_us_a_step": figures},
    )
