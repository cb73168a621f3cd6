"""`outrider serve` under the names that vLLM's users type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli import serve as serving
from outrider.cli.app import app
from outrider.cli.compatibility.command import rules, translate
from outrider.cli.compatibility.spellings import whole_number
from outrider.cli.compatibility.table import SETTING_SWITCHES, SETTINGS
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


FLAGS = [line.split() for line in (Path(__file__).parent / "vllm_flags.txt").read_text().splitlines()]
"""Each flag of `vllm serve` 0.9.2, 0.18.1, 0.26.0 and 0.33.0, and whether it is a switch or has a value."""
REFUSED = {flag: rule for flag, rule in rules().items() if not rule.harmless}


def test_each_flag_of_vllm_is_an_option_or_has_a_rule() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    known = {*options, *rules(), *SETTINGS, *SETTING_SWITCHES}
    assert {flag for flag, _ in FLAGS} - known == set()
    switches = [flag for flag, kind in FLAGS if kind == "switch" and flag.startswith("--")]
    assert {f"--no-{flag[2:]}" for flag in switches} - known == set()
    assert [flag for flag, kind in FLAGS if flag in rules() and rules()[flag].takes_value is (kind == "switch")] == []


@pytest.mark.parametrize(
    "words",
    [
        "--enable-chunked-prefill",
        "--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log",
        "--pipeline-parallel-size 1 -pp1 --data-parallel-size=1 --seed 0 --tokenizer-mode auto",
        "--load-format auto --max-model-len -1 --max-model-len=auto",
        "--task generate --runner auto --config-format hf --response-role assistant -O3 -O.level 3",
        "--uvicorn-log-level warning --enable-prompt-tokens-details --no-enable-lora --swap-space 4",
    ],
)
def test_what_asks_for_what_is_so_anyway_is_passed_over_with_a_line(words: str, read: Any) -> None:
    settings, _, written = read("/t", *words.split())
    for flag in (word.partition("=")[0] for word in words.split() if word.startswith("--")):
        assert f"{flag} " in written
        assert "has no effect: " in written
    assert (settings.target.model, settings.target.max_model_len, settings.target.load_format) == (
        *("/t", None),
        "safetensors",
    )


def test_flags_that_set_what_set_sets(read: Any) -> None:
    settings, _, _ = read(
        *(
            "/t",
            "--ssl-keyfile",
            "/k",
            "--ssl-certfile=/c",
            "--root-path",
            "/api/",
            "-asc",
            "3",
            "--shutdown-timeout=9",
        ),
        *("--allowed-origins", '["https://a.example", "https://b.example"]', "--allow-credentials"),
        *("--logprobs-mode", "processed_logprobs", "--disable-custom-all-reduce", "--num_gpu_blocks_override", "70"),
        *("-ep", "--calculate-kv-scales", "--kv-cache-dtype", "fp8", "--scheduling-policy", "priority"),
    )
    gateway = settings.gateway
    assert (gateway.tls_key_file, gateway.tls_cert_file, gateway.root_path, gateway.num_processes) == (
        *("/k", "/c", "/api"),
        3,
    )
    assert (gateway.allowed_origins, gateway.allow_credentials) == ("https://a.example,https://b.example", True)
    assert (settings.coordinator.logprobs_mode, settings.coordinator.drain_grace_s) == ("processed", 9.0)
    assert (settings.target.one_shot_all_reduce, settings.target.num_pages) == (False, 70)
    assert settings.target.enable_expert_parallel and settings.coordinator.scheduling_policy == "priority"
    assert (settings.target.kv_cache_scales, settings.draft.kv_cache_scales) == ("measured", "measured")


@pytest.mark.parametrize(("words", "size"), [("-tp2", 2), ("-tp=4", 4), ("-tp 3", 3), ("--tensor_parallel_size=5", 5)])
def test_a_value_may_be_attached_to_a_short_flag(words: str, size: int, read: Any) -> None:
    assert read("/t", *words.split())[0].target.tensor_parallel_size == size


@pytest.mark.parametrize(
    "words",
    [
        ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=3"],
    ],
)
def test_the_speculative_config_has_a_short_name_and_keys_one_by_one(words: list[str], read: Any) -> None:
    settings, _, _ = read("/t", *words)
    assert (settings.draft.method, settings.coordinator.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600)])
def test_lengths_may_be_written_short(text: str, number: int, read: Any) -> None:
    settings, _, _ = read("/t", "--max-model-len", text, "--max-num-batched-tokens", text)
    assert (settings.target.max_model_len, settings.target.max_batched_tokens) == (number, number)


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "4x", "-4"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number"):
        whole_number(text)


@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_what_is_not_offered_is_refused_with_the_reason(form: str) -> None:
    for flag, rule in REFUSED.items():
        words = iter((form if rule.takes_value else "{}").format(flag).split())
        with pytest.raises(typer.BadParameter) as refused:
            translate(None, next(words), words)
        assert refused.value.param_hint == flag
        assert refused.value.message == f"is not supported: {rule.reason}."


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seed 7", "should be 0 or None, or left out: each request has a seed of its own"),
        ("--no-enable-chunked-prefill", "long prompts are always cut into chunks"),
        ("-pp 2", "a model is split by --tensor-parallel-size"),
        ("--compilation-config.level 3", "CUDA graphs follow"),
        ("--seed", "needs a value"),
        ("--max-model-len 4x", "Invalid value for '--max-model-len': '4x' is no whole number, such as 4096"),
        ("--allowed-origins [", "should be texts with commas, or a JSON list"),
        ("--root-path x", "should be a path such as /outrider"),
    ],
)
def test_other_values_are_refused_with_what_to_use(words: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    outcome = runner.invoke(app, ["serve", "/t", *words.split()])
    assert outcome.exit_code != 0
    assert told in outcome.stderr


def test_the_target_is_named_once(tmp_path: Path) -> None:
    outcome = runner.invoke(app, ["serve", "/a", "--model", "/b"])
    assert outcome.exit_code == 1
    assert "--model: is /b, and the target was named /a" in outcome.stderr


@pytest.mark.parametrize("value", ["0", "1.2", "-1"])
def test_a_share_of_memory_is_a_share(value: str) -> None:
    outcome = runner.invoke(app, ["serve", "/a", "--gpu-memory-utilization", value])
    assert outcome.exit_code == 1
    assert "--gpu-memory-utilization: should be above 0 and at most 1" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--max_num_batched_tokens=0", "--max-num-batched-tokens"),
        ("-tp0", "-tp"),
        ("--dtype fp8", "--dtype"),
        ("--dtype half --draft-dtype fp8", "--draft-dtype"),
        ("--port 70000", "--port"),
        ("--metrics-port 65535", "--metrics-port"),
        ("--root-path x", "--root-path"),
        ("--api-server-count 0", "--api-server-count"),
        ("--block-size 4 --set target.page_size=0", "--set target.page_size"),
        ("--set coordinator.max_queue=-1", "--set coordinator.max_queue"),
        ('-sc {"method":"foo"}', "-sc.method"),
        ('-sc {"num_speculative_tokens":-1}', "-sc.num_speculative_tokens"),
    ],
)
def test_an_error_names_the_flag_or_key_that_was_typed(words: str, named: str) -> None:
    outcome = runner.invoke(app, ["serve", "/t", *words.split()])
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: {named}: ")


def test_config_names_the_key_of_the_speculative_config_too() -> None:
    outcome = runner.invoke(app, ["config", "-sc", '{"method":"foo"}'])
    assert outcome.stderr.startswith("error: -sc.method: should be 'draft_model'")
