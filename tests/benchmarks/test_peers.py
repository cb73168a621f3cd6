"""Other engines beside ours: one that is installed is run for real, one that is not is scripted."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.peers.engines import Generated, Pair, vllm_plain, vllm_speculative
from outrider.benchmarks.peers.run import (
    Load,
    PeerOutcome,
    PeerPlan,
    installed,
    make_loads,
    num_different,
    run_plan,
    to_result,
    to_rows,
)
from outrider.benchmarks.schema import from_json, to_json
from outrider.benchmarks.tables import render
from outrider.benchmarks.tables.short import short_lines
from outrider.cli.bench import app
from outrider.errors import ConfigError
from tests.support.tiny_models import cached_tiny_model, load_reference

PROMPT = (3, 1, 4, 1, 5, 9)
ONE_PROMPT = (Load(1, ((PROMPT,),)),)
FACTS = {"pair": "a / b", "target": "a", "synthetic": False}
METRICS = "metrics=types.SimpleNamespace(first_token_ts=1.0, last_token_ts=9.0)"
FAKE_VLLM = """
import os, subprocess, sys, types

__version__ = "0.26.0+cu129"
SamplingParams = types.SimpleNamespace
print('{"engine": "vllm", "loads": []}')


class LLM:
    def __init__(self, **options):
        print("engine with", options["max_num_seqs"], options.get("load_format"))
        print("share", options.get("gpu_memory_utilization"), file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('from a process of the engine')"], check=True)

    def generate(self, prompts, sampling, use_tqdm):
        print("prompts", len(prompts))
        if os.environ.get("FAKE_VLLM_FAILS"):
            raise RuntimeError("See root cause above")
        token_ids = [prompts[0]["prompt_token_ids"][0]] * sampling.max_tokens
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=token_ids)]) for _ in prompts]
"""


def pair_of(folder: Path, **changes: Any) -> Pair:
    facts = {"target": str(folder), "draft": None, "device": "cpu", "dtype": "float32", "draft_length": 4}
    return Pair(**{**facts, "max_length": 64, **changes})


@pytest.mark.integration
def test_a_peer_says_what_its_model_says_and_is_timed() -> None:
    folder = cached_tiny_model("llama")
    plan = PeerPlan(("transformers",), pair_of(folder), (Load(2, ((PROMPT, PROMPT),)),), num_tokens=6)
    (outcome,) = run_plan(plan)
    reference: Any = load_reference(folder)
    import torch

    expected = list(PROMPT)
    with torch.inference_mode():
        for _ in range(6):
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    assert outcome.tokens == (tuple(expected[len(PROMPT) :]),) * 2
    assert outcome.first_ms[0] > 0
    assert len(outcome.all_ms) == 1, "both prompts go together"
    text = render([to_result([outcome], plan, name="some", configuration=FACTS)])
    import transformers

    assert f"| transformers {transformers.__version__} | 0 | 6 | 6 | 2 |  |" in text
    assert "| 0/2 |" in text


def test_prompts_that_differ_are_counted_against_the_first() -> None:
    first = PeerOutcome("vllm", (2.0, 4.0), (1.0, 1.0), ((1, 2), (3, 4)), (5.0,), 2)
    other = PeerOutcome("transformers", (1.0, 1.0), (1.0, 1.0), ((1, 2), (3, 5)), (4.0,), 2)
    assert num_different(other, first) == 1
    outcomes = [dataclasses.replace(first, num_users=1, tokens=((7,),)), first, other]
    pair = pair_of(Path("a"), device="cuda", tensor_parallel_size=2)
    assert to_rows(outcomes, pair)[1:] == [
        ("vllm", 2, 1.0, 3.0, pytest.approx(1e3 / 3), 200.0, "2/2"),
        ("transformers", 2, 1.0, 1.0, 1e3, 500.0, "1/2"),
    ]
    assert [row[5] for row in to_rows(outcomes, pair_of(Path("a")))] == [""] * 3, "a CPU is no GPU"


def test_each_number_of_users_has_different_prompts_and_enough_repetitions() -> None:
    loads = make_loads((1, 8, 1, 32), 3, 40, lambda count: [(index,) for index in range(count)])
    assert [(load.num_users, len(load.groups)) for load in loads] == [(1, 40), (8, 5), (32, 3)]
    for load in loads:
        assert {len(group) for group in load.groups} == {load.num_users}
        assert len({prompt for group in load.groups for prompt in group}) == load.num_users * len(load.groups)


@pytest.mark.parametrize(
    ("engines", "users", "said"),
    [
        (("vllm",), (0,), "must be at least 1, not 0"),
        (("vllm",), (), "names no number of users"),
        ((), (1,), "names no engine"),
        (("transformers", "transformers-assisted"), (1, 8), "must be 1 for transformers-assisted"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(engines: tuple[str, ...], users: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PeerPlan(engines, pair_of(Path("a"), draft="b"), make_loads(users, 1, 1, lambda count: [PROMPT] * count))


def test_random_weights_are_for_vllm_and_speculation_needs_a_draft() -> None:
    with pytest.raises(ConfigError, match="is needed by vllm-speculative"):
        PeerPlan(("vllm", "vllm-speculative"), pair_of(Path("a")), ONE_PROMPT)
    with pytest.raises(ConfigError, match="must be safetensors for transformers"):
        PeerPlan(("vllm", "transformers"), pair_of(Path("a"), load_format="dummy"), ONE_PROMPT)


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """A folder of packages with a scripted vLLM, which prints a lot."""
    packages = tmp_path / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm/__init__.py").write_text(FAKE_VLLM)
    return packages


def test_an_engine_starts_once_for_all_numbers_of_users(fake_vllm: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of a run before")
    loads = make_loads((1, 8, 32), 3, 4, lambda count: [(index,) for index in range(count)])
    pair = pair_of(tmp_path, draft="d", device="cuda", tensor_parallel_size=2, gpu_memory_utilization=0.5)
    plan = PeerPlan(("vllm", "vllm-speculative"), pair, loads, num_tokens=4, packages=str(fake_vllm), log=log)
    outcomes = run_plan(plan)
    assert [(one.engine, one.num_users, len(one.all_ms)) for one in outcomes] == [
        (engine, users, runs) for engine in plan.engines for users, runs in ((1, 4), (8, 3), (32, 3))
    ]
    assert {one.version for one in outcomes} == {"0.26.0+cu129"}
    printed = log.read_text().splitlines()
    assert printed.count("engine with 32 None") == 2
    assert printed.count("share 0.5") == 2
    assert printed.count("from a process of the engine") == 2
    assert printed.count("prompts 32") == 2 * (1 + 3) * 2, "a warm-up and the repetitions, for one token and for all"
    assert "of a run before" not in printed

    result = to_result(outcomes, plan, name="h100-vllm", configuration=FACTS)
    assert from_json(json.loads(json.dumps(to_json(result)))) == result
    assert result.configuration["engines"]["vllm-speculative"] == {
        "version": "0.26.0+cu129", "num_gpus": 2, "num_speculative_tokens": 4
    }  # fmt: skip
    assert len(short_lines([result])) == 6


def test_the_table_has_figures_per_user_and_per_gpu() -> None:
    plan = PeerPlan(
        ("vllm", "vllm-speculative"), pair_of(Path("a"), draft="b", device="cuda", tensor_parallel_size=2), ONE_PROMPT
    )
    slow = PeerOutcome("vllm", (8.0, 10.0, 9.0), (20.0,) * 3, (PROMPT,) * 24, (10.0,) * 3, 8, "0.26.0", (9.5,) * 3)
    fast = dataclasses.replace(slow, engine="vllm-speculative", ms_per_token=(4.0,), tokens=(PROMPT[:3],) * 24)
    text = render([to_result([slow, fast], plan, name="some", configuration=FACTS)])
    assert "| vllm 0.26.0 | 0 | 6 | 128 | 8 | 2 | 111.1 | 400.0 | 20.0 | 9.00 | 10.00 (9.50) | 0/24 |" in text
    assert (
        "| vllm-speculative 0.26.0 | 4 | 6 | 128 | 8 | 2 | 250.0 | 400.0 | 20.0 | 4.00 | 10.00 (9.50) | 24/24 |" in text
    )
    assert "tok/s per GPU: users x 1000 / until all finished / GPUs" in text


def test_the_command_shows_and_saves_each_number_of_users(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "pair/target"
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"vocab_size": 100}')
    arguments = [str(target), "--packages", str(fake_vllm), "--device", "cuda", "--peer", "vllm", "--save", "some"]
    lengths = {"--input-len": 4, "--output-len": 2, "--runs": 2, "--num-prompts": 1}
    arguments += ["--load-format", "dummy", *(str(word) for item in lengths.items() for word in item)]
    result = CliRunner().invoke(app, ["peers", *arguments, "--max-concurrency", "1", "--max-concurrency", "3"])
    assert result.exit_code == 0, result.stderr
    heads = result.stdout.partition("vllm")[0]
    assert "users" in heads and "per GPU" in heads
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("vllm")]
    assert [(row[1], row[-1]) for row in rows] == [("1", "2/2"), ("3", "6/6")]
    saved = json.loads((tmp_path / "benchmarks/results/some.json").read_text())
    assert saved["configuration"]["pair"] == "target / none"
    assert saved["configuration"]["num_users"] == [1, 3]
    assert {series["labels"]["num_users"] for series in saved["series"]} == {1, 3}
    refused = CliRunner().invoke(app, ["peers", *arguments, "--max-concurrency", "0"])
    assert refused.exit_code == 2


def test_vllm_is_asked_as_its_documentation_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    has_times = True

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def generate(self, prompts: list[dict[str, Any]], sampling: Any, use_tqdm: bool) -> list[Any]:
            assert prompts == [{"prompt_token_ids": list(PROMPT)}] * 2
            assert (sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (0.0, True, False)
            count = sampling.max_tokens
            return [
                SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=range(count))],
                    metrics=SimpleNamespace(first_token_ts=7.0, last_token_ts=7.0 + count) if has_times else None,
                )
                for _ in prompts
            ]

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    pair = pair_of(tmp_path, draft="somewhere", device="cuda", num_users=2, tensor_parallel_size=2)
    assert vllm_plain(pair)((PROMPT, PROMPT), 3) == Generated([[0, 1, 2]] * 2, [3.0] * 2)
    has_times = False
    assert vllm_speculative(pair)((PROMPT, PROMPT), 2) == Generated([[0, 1]] * 2)
    assert {(options["tensor_parallel_size"], options["max_num_seqs"]) for options in asked} == {(2, 2)}
    assert asked[0]["speculative_config"] is None
    assert not {"load_format", "gpu_memory_utilization"} & asked[0].keys(), "vLLM's own"
    assert asked[1]["speculative_config"] == {
        "method": "draft_model",
        "model": "somewhere",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 2,
    }
    with pytest.raises(ConfigError, match="draft-model"):
        vllm_speculative(pair_of(tmp_path))


def test_what_cannot_be_run_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, said in (["--peer", "pigeon"], "pigeon"), (["nowhere", "--peer", "transformers"], "config.json"):
        result = CliRunner().invoke(app, ["peers", *arguments])
        assert result.exit_code == 1
        assert said in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_peer_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers failed"):
        run_plan(PeerPlan(("transformers",), pair_of(tmp_path / "nothing"), ONE_PROMPT, num_tokens=2))


def test_the_log_has_what_came_before_the_last_line(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")
    log = tmp_path / "log"
    plan = PeerPlan(("vllm",), pair_of(tmp_path), ONE_PROMPT, num_tokens=2, packages=str(fake_vllm), log=log)
    with pytest.raises(ConfigError, match=r"See root cause above \(.*/log has all that it printed\)"):
        run_plan(plan)
    assert "engine with 1" in log.read_text()
    with pytest.raises(ConfigError, match="--log FILE keeps all"):
        run_plan(dataclasses.replace(plan, log=None))
    with pytest.raises(ConfigError, match="cannot be written"):
        run_plan(dataclasses.replace(plan, log=tmp_path / "no folder/log"))


def test_a_folder_of_packages_is_seen_by_the_peers(tmp_path: Path) -> None:
    assert "vllm" not in installed()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('this is the unpacked one')")
    assert {"vllm", "vllm-speculative"} <= set(installed(str(tmp_path)))
    with pytest.raises(ConfigError, match="the unpacked one"):
        run_plan(PeerPlan(("vllm",), pair_of(tmp_path), ONE_PROMPT, num_tokens=2, packages=str(tmp_path)))


def test_a_token_of_a_user_takes_what_its_own_stream_took(tmp_path: Path) -> None:
    packages = tmp_path / "packages/vllm"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text(
        FAKE_VLLM.replace("token_ids=token_ids)]", f"token_ids=token_ids)], {METRICS}")
    )
    pair = pair_of(tmp_path, device="cuda")
    loads = make_loads((2,), 3, 6, lambda count: [(index,) for index in range(count)])
    (outcome,) = run_plan(PeerPlan(("vllm",), pair, loads, num_tokens=5, packages=str(packages.parent)))
    assert outcome.ms_per_token == (2e3,) * 3, "eight seconds for the four tokens after the first"
    assert max(outcome.after_first_ms) < 1e3
