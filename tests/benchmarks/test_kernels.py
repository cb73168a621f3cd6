"""The kernel benchmark: a whole run at tiny sizes, and a gate that refuses a kernel that is wrong. No test looks at a
speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from outrider.benchmarks.engine.measuring import EngineGateError
from outrider.benchmarks.kernels import run
from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace, relative_error
from outrider.benchmarks.kernels.run import NUM_KERNELS, KernelPlan, run_plan, to_result, to_rows
from outrider.benchmarks.schema import from_json, to_json
from outrider.errors import ConfigError

PLAN = KernelPlan(num_rows=2, tokens_per_row=3, num_positions=2, num_samples=2, num_warmups=1)
CPU = KernelPlace(torch.device("cpu"), torch.float32)


def test_every_kernel_is_checked_timed_and_set_beside_its_floor() -> None:
    done: list[None] = []
    series = run_plan(PLAN, device="cpu", dtype="auto", on_done=lambda: done.append(None))
    rows = to_rows(series)
    assert len(rows) == len(done) == NUM_KERNELS
    assert {name.split(" ")[0] for name, *_ in rows} >= {
        "scoring",
        "draft",
        "linear",
        "norm",
        "swiglu",
        "rotary",
        "paged",
        "copy",
    }
    assert all(taken > 0 and floor > 0 for _, _, taken, floor, _ in rows)
    result = to_result(series, PLAN, name="tiny", device="cpu", dtype="auto")
    assert from_json(to_json(result)) == result


def test_a_single_position_has_no_drafts_to_score() -> None:
    assert len(to_rows(run_plan(dataclasses.replace(PLAN, num_positions=1), device="cpu", dtype="auto"))) == NUM_KERNELS


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def broken(*_: object, **__: object) -> Iterator[KernelCase]:
        yield KernelCase("norm", "1 x 1", 4, lambda _: timed.append("norm"), lambda: 0.5, 0.1)

    monkeypatch.setattr(run, "layer_cases", broken)
    for others in ("scoring_cases", "drafting_cases"):
        monkeypatch.setattr(run, others, lambda *_, **__: iter(()))
    with pytest.raises(EngineGateError, match=r"norm, 1 x 1: differs from the reference by 0\.5"):
        run_plan(PLAN, device="cpu", dtype="float32")
    assert not timed


def test_what_is_not_finite_is_never_near_the_reference() -> None:
    truth = torch.ones(3)
    assert relative_error(truth * float("nan"), truth) == float("inf")
    assert relative_error(truth * 1.5, truth) == pytest.approx(0.5)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        run_plan(dataclasses.replace(PLAN, num_samples=1), device="cpu", dtype="float8")
