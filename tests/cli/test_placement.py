"""Devices of the models: what `auto` stands for on hosts with and without GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from outrider.cli.stack import gpus as finding
from outrider.cli.stack.gpus import NO_GPUS, Gpus, find_gpus
from outrider.cli.stack.placement import Placed, place
from outrider.config import load_all
from outrider.errors import ConfigError

ONE, TWO, FOUR = (Gpus(("NVIDIA H200",) * count) for count in (1, 2, 4))
PAIR = {("target", "model"): "/t", ("draft", "model"): "/d"}
TP, DRAFT_TP = ("target", "tensor_parallel_size"), ("draft", "tensor_parallel_size")
ON, DRAFT_ON = ("target", "device"), ("draft", "device")

Flags = Mapping[tuple[str, str], Any]


def placed(gpus: Gpus, flags: Flags, utilization: float | None = None) -> Placed:
    settings = load_all({**PAIR, **flags}, environ={}).settings
    return place(settings, gpus, gpu_memory_utilization=utilization)


@pytest.mark.parametrize(
    ("gpus", "flags", "devices", "note"),
    [
        (NO_GPUS, {}, ("cpu", "cpu"), "no GPU was found: the models run on the CPU"),
        (Gpus(problem="torch 2.13 is built without CUDA"), {}, ("cpu", "cpu"), "built without CUDA: the models run"),
        (ONE, {}, ("cuda:0", "cuda:0"), "target and draft share cuda:0 (NVIDIA H200)"),
        (TWO, {}, ("cuda:0", "cuda:1"), "the target runs on cuda:0 (NVIDIA H200), the draft on cuda:1 (NVIDIA H200)"),
        (TWO, {TP: 2}, ("cuda:0", "cuda:0"), "share cuda:0-1 (2 x NVIDIA H200)"),
        (FOUR, {TP: 2}, ("cuda:0", "cuda:2"), "cuda:0-1 (2 x NVIDIA H200), the draft on cuda:2 (NVIDIA H200)"),
        (FOUR, {TP: 2, DRAFT_TP: 2}, ("cuda:0", "cuda:2"), "the draft on cuda:2-3 (2 x NVIDIA H200)"),
        (TWO, {DRAFT_ON: "cuda:0"}, ("cuda:1", "cuda:0"), "the target runs on cuda:1"),
        (TWO, {ON: "cuda:1"}, ("cuda:1", "cuda:0"), "the draft on cuda:0"),
        (TWO, {ON: "cpu"}, ("cpu", "cuda:0"), "the target runs on cpu, the draft on cuda:0"),
        (TWO, {("draft", "model"): None, ("draft", "method"): "ngram"}, ("cuda:0", "cpu"), "the target runs on cuda:0"),
        (ONE, {ON: "cuda", DRAFT_ON: "cuda"}, ("cuda", "cuda"), ""),
        (TWO, {ON: "cpu", DRAFT_ON: "cpu"}, ("cpu", "cpu"), ""),
    ],
)
def test_each_model_has_a_gpu_where_there_is_one(gpus: Gpus, flags: Flags, devices: tuple[str, str], note: str) -> None:
    made = placed(gpus, flags)
    assert (made.settings.target.device, made.settings.draft.device) == devices
    assert note in made.note and bool(note) == bool(made.note)
    assert ("--optimize latency or throughput" in made.note) == (len(gpus) > 1 and not flags)


@pytest.mark.parametrize(
    ("gpus", "flags", "field", "said"),
    [
        (NO_GPUS, {TP: 2}, "target.tensor_parallel_size", "is 2, and no GPU was found; --device cpu runs"),
        (NO_GPUS, {("draft", "gpu_memory_utilization"): 0.5}, "draft.gpu_memory_utilization", "and no GPU was found"),
        (ONE, {TP: 2}, "target.tensor_parallel_size", "is 2, which needs cuda:0-1; there is 1 (NVIDIA H200)"),
        (ONE, {DRAFT_TP: 2}, "draft.tensor_parallel_size", "is 2"),
        (TWO, {TP: 2, ON: "cuda:1"}, "target.tensor_parallel_size", "needs cuda:1-2"),
        (NO_GPUS, {ON: "cuda"}, "target.device", "cuda is set, but there is no GPU here"),
        (ONE, {DRAFT_ON: "cuda:1"}, "draft.device", "cuda:1 is set, but there is 1 (NVIDIA H200)"),
    ],
)
def test_more_gpus_than_there_are_is_refused(gpus: Gpus, flags: Flags, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(gpus, flags)
    assert refused.value.field == field
    assert said in str(refused.value)


def test_several_processes_on_the_cpu_must_be_asked_for() -> None:
    made = placed(TWO, {TP: 2, ON: "cpu", DRAFT_ON: "cpu"})
    assert made.settings.target.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "utilization", "shares"),
    [
        ({}, None, (0.7, 0.2)),
        ({DRAFT_ON: "cuda:1"}, None, (None, None)),
        ({DRAFT_ON: "cuda:1", TP: 2}, None, (0.7, 0.2)),
        ({DRAFT_ON: "cpu"}, None, (None, None)),
        ({("target", "kv_cache_bytes"): 1 << 30}, None, (None, 0.2)),
        ({("target", "gpu_memory_utilization"): 0.5, ("draft", "num_pages"): 7}, None, (0.5, None)),
        ({}, 0.45, (0.35, 0.1)),
        ({DRAFT_ON: "cuda:1"}, 0.45, (0.45, 0.45)),
        ({DRAFT_ON: "cpu"}, 0.45, (0.45, None)),
    ],
)
def test_models_on_one_gpu_have_each_a_share_of_it(
    flags: Flags, utilization: float | None, shares: tuple[float | None, float | None]
) -> None:
    settings = placed(TWO, {ON: "cuda", DRAFT_ON: "cuda", **flags}, utilization).settings
    assert (settings.target.gpu_memory_utilization, settings.draft.gpu_memory_utilization) == shares


def test_a_share_of_a_gpu_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: .* no model is on a GPU"):
        placed(NO_GPUS, {}, 0.5)


def test_nothing_is_asked_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "has_driver", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert find_gpus() == NO_GPUS


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (
            'print(\'{"names": ["A", "B"], "memory": [8, 9], "torch": "2.13", "cuda": "13.0"}\')',
            Gpus(("A", "B"), (8, 9)),
        ),
        (
            'print(\'{"names": [], "memory": [], "torch": "2.13", "cuda": null}\')',
            Gpus(problem="torch 2.13 is built without CUDA"),
        ),
        ('raise SystemExit("no torch")', Gpus(problem="torch did not say which GPUs it can use: no torch")),
        ("print(1", Gpus(problem="torch did not say which GPUs it can use: SyntaxError: '(' was never closed")),
    ],
)
def test_torch_says_what_it_can_use(question: str, expected: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "has_driver", lambda: True)
    monkeypatch.setattr(finding, "QUESTION", question)
    assert find_gpus() == expected
