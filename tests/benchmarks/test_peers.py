"""Other engines beside ours: one that is installed is run for real, one that is not is scripted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.peers.engines import Pair, vllm_plain, vllm_speculative
from outrider.benchmarks.peers.run import Outcome, Plan, installed, num_different, run_plan, to_result, to_rows
from outrider.benchmarks.tables import render
from outrider.cli.bench import app
from outrider.errors import ConfigError
from tests.support.tiny_models import cached_tiny_model, load_reference

PROMPT = (3, 1, 4, 1, 5, 9)


def pair_of(folder: Path, **changes: Any) -> Pair:
    facts = {"target": str(folder), "draft": None, "device": "cpu", "dtype": "float32", "draft_length": 4}
    return Pair(**{**facts, "max_length": 64, **changes})


def test_a_peer_says_what_its_model_says_and_is_timed() -> None:
    folder = cached_tiny_model("llama")
    plan = Plan(("transformers",), pair_of(folder, num_users=2), (PROMPT, PROMPT), num_tokens=6)
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
    text = render([to_result([outcome], plan, name="some", configuration={"pair": "a / b", "synthetic": False})])
    assert "| transformers | 1 | 0 | 6 | 6 | 2 |" in text
    assert "| 0/2 |" in text


def test_prompts_that_differ_are_counted_against_the_first() -> None:
    first = Outcome("a", (2.0, 4.0), (1.0, 1.0), ((1, 2), (3, 4)))
    other = Outcome("b", (1.0, 1.0), (1.0, 1.0), ((1, 2), (3, 5)))
    assert num_different(other, first) == 1
    assert to_rows([first, other]) == [("a", 1.0, 3.0, pytest.approx(1e3 / 3), "2/2"), ("b", 1.0, 1.0, 1e3, "1/2")]


def test_vllm_is_asked_as_its_documentation_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def generate(self, prompts: list[dict[str, Any]], sampling: Any, use_tqdm: bool) -> list[Any]:
            assert prompts == [{"prompt_token_ids": list(PROMPT)}] * 2
            assert (sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (0.0, True, False)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(sampling.max_tokens))]) for _ in prompts]

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    pair = pair_of(tmp_path, draft="somewhere", device="cuda", num_users=2, tensor_parallel_size=2)
    assert vllm_plain(pair)((PROMPT, PROMPT), 3) == [[0, 1, 2]] * 2
    assert vllm_speculative(pair)((PROMPT, PROMPT), 2) == [[0, 1]] * 2
    assert {(options["tensor_parallel_size"], options["max_num_seqs"]) for options in asked} == {(2, 2)}
    assert asked[0]["speculative_config"] is None
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
        run_plan(Plan(("transformers",), pair_of(tmp_path / "nothing"), (PROMPT,), num_tokens=2))


def test_a_folder_of_packages_is_seen_by_the_peers(tmp_path: Path) -> None:
    assert "vllm" not in installed()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('this is the unpacked one')")
    assert {"vllm", "vllm-speculative"} <= set(installed(str(tmp_path)))
    with pytest.raises(ConfigError, match="the unpacked one"):
        run_plan(Plan(("vllm",), pair_of(tmp_path), (PROMPT,), num_tokens=2, packages=str(tmp_path)))
