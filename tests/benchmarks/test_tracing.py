"""Cost of tracing: the rig takes real steps, and what is said of them follows from the samples."""

from __future__ import annotations

import pytest

from outrider.benchmarks.schema import from_json, to_json
from outrider.benchmarks.tracing.rig import DRAFT_LENGTH, Rig, Tracings
from outrider.benchmarks.tracing.run import (
    ARMS,
    MAKING,
    NOT_SAMPLED,
    PLACES,
    SAMPLED,
    TracingPlan,
    added_us,
    run_plan,
    to_result,
    to_rows,
)
from outrider.errors import IntegrityError
from outrider.telemetry.tracing import TraceContext, names
from outrider.telemetry.tracing.context import new_span_id
from outrider.telemetry.tracing.service_spans import ServiceRecorder
from outrider.telemetry.tracing.span import BuildSpans, Span

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


class Kept:
    """Keeps spans instead of exporting them, and samples as callers do."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def sample(self, name: str, parent: TraceContext | None) -> TraceContext | None:
        assert parent is not None
        return TraceContext(parent.trace_id, new_span_id(), is_sampled=True) if parent.is_sampled else None

    def emit(self, build: BuildSpans) -> None:
        self.spans += build()

    def close(self) -> None:
        pass


def take_steps(caller: str, kept: Kept, num_steps: int) -> Rig:
    tracings = Tracings(kept, ServiceRecorder(kept, "target"), ServiceRecorder(kept, "draft"))
    rig = Rig(tracings, caller=caller, num_steps=num_steps)
    for _ in range(num_steps - 1):
        cost = rig.step()
        assert min(cost.coordinator, cost.target, cost.draft) > 0
    return rig


def test_a_sampled_request_of_the_rig_makes_the_spans_of_a_real_one() -> None:
    kept = Kept()
    rig = take_steps(f"{CALLER}1", kept, 9)
    rig.end()
    assert rig.request_state.loop.spec_stats.num_drafts == 8
    named = [span.name for span in kept.spans]
    assert named.count(names.ACCEPT) == 9
    assert named.count(names.SCORE_ITEM) == named.count(names.SCORE) == 9
    drafts = [span for span in kept.spans if span.name == names.STEP]
    assert [span.attributes[names.DRAFT_LENGTH] for span in drafts[1:9]] == [DRAFT_LENGTH] * 8


def test_a_request_that_is_not_sampled_makes_none() -> None:
    kept = Kept()
    take_steps(f"{CALLER}0", kept, 5).end()
    assert kept.spans == []


def test_what_is_added_is_the_difference_within_a_round() -> None:
    done: list[None] = []
    plan = TracingPlan(num_steps=6, num_rounds=3)
    series = run_plan(plan, on_done=lambda: done.append(None))
    assert len(done) == 4
    assert {(item.name, item.labels["arm"]) for item in series} == {
        *((place, arm) for place in PLACES for arm in ARMS),
        (MAKING, SAMPLED),
    }
    assert all(len(item.samples) == 3 and min(item.samples) > 0 for item in series)
    by_arm = {item.labels["arm"]: item.samples for item in series if item.name == "target"}
    differences = sorted(more - less for more, less in zip(by_arm[SAMPLED], by_arm["off"], strict=True))
    assert added_us(series, "target", SAMPLED) == differences[1]
    assert [row[0] for row in to_rows(series)] == [*PLACES, MAKING]
    result = to_result(series, plan, name="some")
    assert from_json(to_json(result)) == result
    assert result.figures["added_us_a_step"][NOT_SAMPLED]["draft"] == pytest.approx(
        added_us(series, "draft", NOT_SAMPLED)
    )


def test_what_does_not_trace_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceRecorder, "ended", lambda self, items: None)
    with pytest.raises(IntegrityError, match="left 0 spans of the target"):
        run_plan(TracingPlan(num_steps=8, num_rounds=1))
