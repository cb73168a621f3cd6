"""Command lines and their output, where no service is needed."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

import outrider
from outrider import __version__
from outrider.cli.app import app, main
from outrider.cli.info import info_lines
from outrider.config import CoordinatorSettings
from outrider.generation import TO_THE_END
from tests.client.conftest import Service
from tests.support.scripted_generator import INFO

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Looks like a model to whoever does not load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"outrider {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate", "demo", "trace", "info", "config"])
def test_every_command_has_help(command: str) -> None:
    outcome = runner.invoke(app, [command, "--help"])
    assert outcome.exit_code == 0
    assert "--help" in outcome.output


def test_config_shows_every_setting_and_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_COORDINATOR_MAX_QUEUE", "9")
    outcome = runner.invoke(app, ["config", "--set", "coordinator.port=1234", "--set", "draft.method=ngram"])
    assert outcome.exit_code == 0, outcome.output
    lines = {line.split()[0]: line.split()[1:] for line in outcome.stdout.splitlines() if "." in line}
    for key in CoordinatorSettings.model_fields:
        assert f"coordinator.{key}" in lines
    assert lines["coordinator.port"][:2] == ["1234", "flag"]
    assert lines["coordinator.max_queue"][:2] == ["9", "OUTRIDER_COORDINATOR_MAX_QUEUE"]
    assert lines["coordinator.draft_length"][:2] == ["auto", "default"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["config", "--set", "coordinator.prot=1"],
            "error: --set coordinator.prot: is not a setting; did you mean --set coordinator.port?",
        ),
        (["config", "--set", "port"], "SECTION.KEY=VALUE"),
        (["config", "--speculative-config", '{"num_spec": 1}'], "error: --speculative-config.num_spec: "),
        (["config", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["serve"], "error: a model is needed: outrider serve MODEL (a folder or a Hub id)"),
        (["serve", "/nowhere"], "target model: /nowhere does not exist"),
        (["serve", "MODEL", "--draft-model", "/nowhere"], "draft model: /nowhere does not exist"),
        (["serve", "MODEL", "-k", "-1"], "error: -k: should be"),
        (["serve", "MODEL", "--acceptance-method", "hope"], "error: --acceptance-method: should be"),
        (["serve", "MODEL", "--set", "target.page_size=0"], "error: --set target.page_size: should be"),
        (["serve", "MODEL", "--chat-template", "/nope"], "error: --chat-template: /nope cannot be read"),
        (["serve", "MODEL", "--device", "tpu"], "error: --device: should be"),
        (
            ["serve", "MODEL", "--speculative-config", '{"draft_tensor_parallel_size": 2}'],
            "error: --speculative-config.draft_tensor_parallel_size: ",
        ),
        (["serve", "MODEL", "--port", "PORT"], "127.0.0.1:PORT is in use"),
        (["generate", "x", "-a", "127.0.0.1:1", "--timeout", "5"], "127.0.0.1:1"),
        (["generate", "x", "--logit-bias", "7"], "error: --logit-bias: should be ID=BIAS"),
        (["info", "-a", "127.0.0.1:1"], "127.0.0.1:1"),
        (["demo", "--target", "/nowhere"], "target model: /nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_one_clear_line(model: Path, argv: list[str], said: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"MODEL": str(model), "PORT": str(taken.getsockname()[1])}
        outcome = runner.invoke(app, [names.get(word, word) for word in argv])
    assert outcome.exit_code == 1, outcome.output
    assert outcome.stdout == ""
    assert said.replace("PORT", names["PORT"]) in outcome.stderr
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_file_is_refused_before_anything_starts(model: Path, missing: str) -> None:
    (model / missing).unlink()
    outcome = runner.invoke(app, ["serve", str(model)])
    assert outcome.exit_code == 1
    assert str(model) in outcome.stderr
    assert missing.removeprefix("model") in outcome.stderr


def test_a_broken_model_config_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{")
    outcome = runner.invoke(app, ["serve", str(model)])
    assert outcome.exit_code == 1
    assert "config.json cannot be read" in outcome.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "outrider.cli", "config"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_a_prompt_comes_from_an_argument_standard_input_or_a_file(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ADDRESS", service.address)
    (tmp_path / "prompt.txt").write_text("of a file")
    outcomes = [
        runner.invoke(app, ["generate", "typed", "--max-tokens", "2"]),
        runner.invoke(app, ["generate", "-", "--max-tokens", "2"], input="piped"),
        runner.invoke(app, ["generate", "--file", str(tmp_path / "prompt.txt"), "-k", "0", "--max-tokens", "2"]),
    ]
    assert [outcome.stdout for outcome in outcomes] == ["<0><1>\n"] * 3, outcomes[-1].stderr
    assert [request.prompt for request in service.generator.requests] == ["typed", "piped", "of a file"]
    assert service.generator.requests[2].num_speculative_tokens == 0


def test_a_prompt_file_that_cannot_be_read_is_named_once() -> None:
    outcome = runner.invoke(app, ["generate", "--file", "/nowhere.txt"])
    assert outcome.stderr == "error: prompt: /nowhere.txt cannot be read: No such file or directory\n"


@pytest.mark.parametrize("words", [[], ["x", "--file", "y"], ["--file", "/nowhere"]])
def test_a_prompt_that_is_not_there_is_named(words: list[str], service: Service) -> None:
    outcome = runner.invoke(app, ["generate", "-a", service.address, *words])
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: prompt: ")


def test_a_result_is_one_json_object(service: Service) -> None:
    outcome = runner.invoke(app, ["generate", "x", "--json", "--max-tokens", "3", "-a", service.address])
    made = json.loads(outcome.stdout)
    assert (made["text"], made["token_ids"], made["finish_reason"]) == ("<0><1><2>", [0, 1, 2], "length")
    assert "acceptance_rate" in made["speculation"]


def test_an_output_of_a_grammar_that_is_cut_is_told(service: Service) -> None:
    asked = ["generate", "x", "--max-tokens", "3", "-a", service.address]
    assert "cut" not in runner.invoke(app, asked).stderr
    assert "cut after 3 tokens" in runner.invoke(app, [*asked, "--regex", ".*"]).stderr


def test_without_a_limit_the_server_decides(service: Service) -> None:
    runner.invoke(app, ["generate", "x", "-a", service.address])
    assert service.generator.requests[0].max_tokens == TO_THE_END


def test_info_for_people_and_for_programs(service: Service) -> None:
    shown = runner.invoke(app, ["info", "-a", service.address]).stdout
    assert "4,096 tokens, prompt and output together" in shown
    facts = json.loads(runner.invoke(app, ["info", "--json", "-a", service.address]).stdout)
    assert (facts["target_model"], facts["max_model_len"]) == ("scripted", 4096)


def test_info_says_why_nothing_is_drafted() -> None:
    reason = "drafting does not pay: expected 0.93 of plain at K=3 with 32 sessions"
    facts = dataclasses.replace(INFO, draft_model="small", draft_length_mode="auto", num_running=32)
    lines = dict(info_lines(dataclasses.replace(facts, draft_length=0.0, draft_length_reason=reason)))
    assert lines["drafts"].endswith(f"; 0 now ({reason})")
    assert dict(info_lines(dataclasses.replace(facts, draft_length=3.5)))["drafts"].endswith("; 3.5 now")


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["info"], ["bench"], ["bench", "serve"], ["demo"]])
def test_h_is_help(command: list[str]) -> None:
    outcome = runner.invoke(app, [*command, "-h"])
    assert outcome.exit_code == 0
    assert "Usage" in outcome.output


def test_an_interrupt_while_commands_are_put_together_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.main, "get_command", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_the_package_is_imported_without_any_of_its_modules() -> None:
    code = "import sys, outrider; print([name for name in sys.modules if name.startswith('outrider.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "[]\n"
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name
