"""`outrider serve` under the names that vLLM's users type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import serve as serving
from outrider.cli.app import app
from outrider.cli.vllm_flags import REFUSED
from outrider.config import Effective, Settings

runner = CliRunner()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `serve` up to the point where it has read its settings."""
    monkeypatch.setenv("COLUMNS", "200")
    found: dict[str, Any] = {}

    def keep(effective: Effective, **more: object) -> None:
        found.update(settings=effective.settings, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "prepare_stack", keep)

    def run(*words: str) -> tuple[Settings, dict[str, Any], str]:
        outcome = runner.invoke(app, ["serve", *words])
        assert "settings" in found, outcome.output
        return found["settings"], found, outcome.stderr

    return run


def test_names_of_vllm_set_what_they_mean(read: Any) -> None:
    settings, more, _ = read(
        *("--model", "/t", "--spec-model", "/d", "--spec-tokens", "3", "--served-model-name", "mine"),
        *("--max-num-seqs", "7", "--max-num-batched-tokens", "512", "--block-size", "32", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.8", "--kv-cache-memory-bytes", "4096", "--no-enable-prefix-caching"),
        *("--dtype", "half", "--revision", "v1", "--max-logprobs", "5", "--disable-log-stats"),
    )
    target, draft, coordinator = settings.target, settings.draft, settings.coordinator
    assert (target.model, draft.model, target.served_model_name, target.revision) == ("/t", "/d", "mine", "v1")
    assert (coordinator.num_speculative_tokens, coordinator.max_running_requests, coordinator.max_logprobs) == (3, 7, 5)
    assert (target.max_batched_tokens, target.page_size, target.kv_cache_bytes) == (512, 32, 4096)
    assert (target.cuda_graph_memory_mb, draft.cuda_graph_memory_mb) == (0, 0)
    assert (target.prefix_caching, draft.prefix_caching, target.dtype) == (False, False, "float16")
    assert {section.log_interval_s for section in (target, draft, coordinator)} == {0.0}
    assert more["gpu_memory_utilization"] == 0.8


def test_names_may_be_written_with_underscores(read: Any) -> None:
    settings, _, _ = read("--model", "/t", "--max_num_seqs", "7", "--served_model_name", "a_b", "--max_logprobs=5")
    assert (settings.coordinator.max_running_requests, settings.coordinator.max_logprobs) == (7, 5)
    assert settings.target.served_model_name == "a_b"


@pytest.mark.parametrize(
    ("words", "target", "names"),
    [
        (("/t", "--served-model-name", "a", "b", "c", "-k", "2"), "/t", ["a", "b", "c"]),
        (("--served-model-name", "a", "b", "--model", "/t"), "/t", ["a", "b"]),
        (("/t", "--served-model-name", "a,b", "--served-model-name", "c"), "/t", ["a", "b", "c"]),
        (("/t", "--served-model-name=a", "-k", "2"), "/t", ["a"]),
        (("--served-model-name", "a", "/t"), "/t", ["a"]),
    ],
)
def test_several_served_names_are_taken_as_vllm_takes_them(
    words: tuple[str, ...], target: str, names: list[str], read: Any
) -> None:
    settings, _, _ = read(*words)
    assert (settings.target.model, settings.target.served_model_name) == (target, names[0])
    assert settings.gateway.served_model_name == (",".join(names) if names[1:] else None)


def test_a_switch_of_what_is_so_anyway_is_passed_over_with_a_line(read: Any) -> None:
    _, _, written = read("/t", "--enable-chunked-prefill")
    assert "--enable-chunked-prefill has no effect" in written


@pytest.mark.parametrize("flag", sorted(REFUSED))
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_what_is_not_offered_is_refused_with_the_reason(flag: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    outcome = runner.invoke(app, ["serve", "/t", *form.format(flag).split()])
    assert outcome.exit_code == 2
    assert flag in outcome.stderr
    assert REFUSED[flag] in outcome.stderr


def test_the_target_is_named_once(tmp_path: Path) -> None:
    outcome = runner.invoke(app, ["serve", "/a", "--model", "/b"])
    assert outcome.exit_code == 1
    assert "--model: is /b, and the target was named /a" in outcome.stderr


@pytest.mark.parametrize("value", ["0", "1.2", "-1"])
def test_a_share_of_memory_is_a_share(value: str) -> None:
    outcome = runner.invoke(app, ["serve", "/a", "--gpu-memory-utilization", value])
    assert outcome.exit_code == 1
    assert "--gpu-memory-utilization: should be above 0 and at most 1" in outcome.stderr
