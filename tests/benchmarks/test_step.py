"""A step without its forwards: the stand-ins answer as services do, and three processes are measured."""

import contextlib
import json
from pathlib import Path

import pytest

from outrider.benchmarks.step.run import STAGES, StepPlan, run_plan, to_part_rows, to_result, to_rows
from outrider.benchmarks.step.stamps import PARTS, SIDES, Moments
from outrider.benchmarks.step.stand_in import VOCAB_SIZE, follow, is_right
from outrider.benchmarks.step.turn import STAGES as TURN_STAGES
from outrider.benchmarks.step.turn import StepTimes, TurnPlan, run_turns
from outrider.errors import ConfigError


@pytest.mark.parametrize("acceptance", [0.0, 0.25, 0.75, 1.0])
def test_the_draft_is_right_as_often_as_it_is_told_to_be(acceptance: float) -> None:
    right = sum(is_right(position, acceptance) for position in range(10_000))
    assert right / 10_000 == pytest.approx(acceptance, abs=0.01)


def test_the_language_goes_through_the_whole_vocabulary() -> None:
    assert len(set(follow(0, VOCAB_SIZE))) == VOCAB_SIZE


def test_steps_of_three_real_processes_are_told_apart_from_their_forwards() -> None:
    plan = StepPlan(num_sessions=(1, 3), draft_ms=1.0, target_ms=2.0, num_samples=10, num_warmups=2)
    done: list[None] = []
    series = run_plan(plan, on_done=lambda: done.append(None))
    assert len(done) == plan.num_cases == 4
    between = [item for item in series if item.name == "between_forwards"]
    assert [len(item.samples) for item in between] == [10, 30, 10, 30]
    assert all(item.labels["num_sessions"] in plan.num_sessions for item in between)
    by_stage = {name: [item for item in series if item.name == name] for name in STAGES}
    # A forward takes at least what it was told to; with several sessions a step may wait for a neighbour's too.
    assert all(min(item.samples) > 0.9 * plan.draft_ms for item in by_stage["draft"])
    assert all(min(item.samples) > 0.9 * plan.target_ms for item in by_stage["target"])
    assert all(min(item.samples) > 0 for item in (*by_stage["accept"], *by_stage["wire"]))
    assert [row[:2] for row in to_rows(series)] == [(1, 0.0), (3, 0.0), (1, 1.0), (3, 1.0)]
    names = [f"{side}_{part}" for side in SIDES for part in PARTS]
    for labels in (item.labels for item in between):
        parts = {item.name: item.samples for item in series if item.labels == labels and item.name in names}
        assert set(parts) == set(names)
        # The first step, a prefill, drafts nothing; each item's parts are all known, so all are as many.
        counts = {len(samples) for samples in parts.values()}
        assert len(counts) <= 2 and min(counts) >= int(labels["num_sessions"])
        assert min(min(samples) for samples in parts.values()) >= 0
    assert [row[:3] for row in to_part_rows(series)][:3] == [(1, 0.0, "draft"), (1, 0.0, "target"), (3, 0.0, "draft")]
    assert to_result(series, plan, name="some").kind == "step"


@pytest.mark.parametrize(("temperature", "drafted"), [(0.0, 2), (1.0, 2), (0.0, 0)])
def test_a_step_is_timed_stage_by_stage(temperature: float, drafted: int) -> None:
    plan = TurnPlan((1, 6), temperature, drafted, num_samples=6, num_warmups=2)
    costs = run_turns(plan)
    assert [one.num_sessions for one in costs] == [1, 6]
    for one in costs:
        assert one.micros.keys() == set(TURN_STAGES)
        # Plain steps have nothing to be judged.
        free = set() if drafted else {"judge"}
        assert {stage for stage, micros in one.micros.items() if micros <= 0} <= free
    assert all(0 < one.between_forwards_ms < 1e-3 * one.num_sessions * sum(one.micros.values()) for one in costs)


def test_time_is_counted_once_where_one_stage_ends_after_another_that_began_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([0, 100, 130, 150, 190, 200, 260])
    monkeypatch.setattr("outrider.benchmarks.step.turn.time.thread_time_ns", lambda: 1000 * next(readings))
    times = StepTimes(num_warmups=1, num_samples=1)
    times.note_steps(1)
    later = contextlib.ExitStack()
    with times.timed("decide"):  # from 100 to 200
        with times.timed("judge"):
            pass
        later.enter_context(times.timed("decide"))  # from 190 to 260
    later.close()
    monkeypatch.setattr("outrider.benchmarks.step.turn.time.thread_time_ns", lambda: 300_000)
    times.note_steps(1)
    spent = {stage: micros for stage, micros in times.micros().items() if micros}
    assert spent == {"judge": 20.0, "decide": 140.0, "deliver": 140.0}


def test_moments_of_all_processes_are_put_together_item_by_item(tmp_path: Path) -> None:
    begin = 1_000_000
    items = (("draft", 1), ("target", 2), ("draft", 3), ("target", 4))
    notes = [
        (side, 7, generation, what, begin * (generation + 1) + 1000 * what * what)
        for side, generation in items
        for what in range(6)
    ]
    half_known = [("draft", 7, 5, 0, 9 * begin)]
    paths = [tmp_path / "coordinator", tmp_path / "services"]
    paths[0].write_text(json.dumps(notes[::2] + half_known))
    paths[1].write_text(json.dumps(notes[1::2]))
    found = Moments(paths).parts(0, 10 * begin, num_skipped=0)
    for side in SIDES:
        for part, expected in zip(PARTS, (0.001, 0.003, 0.005, 0.007, 0.009), strict=True):
            assert found[f"{side}_{part}"] == pytest.approx([expected] * 2)
    assert found["draft_turn"] == pytest.approx([0.975] * 2)
    assert found["target_turn"] == pytest.approx([0.975])
    later = Moments(paths).parts(4 * begin, 10 * begin, num_skipped=0)
    assert len(later["draft_there"]) == len(later["target_there"]) == 1
    assert not Moments(paths).parts(0, 10 * begin, num_skipped=2)["draft_there"]


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="over"):
        StepPlan(over="pigeon")
