"""What people type and read, where no service is needed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import __version__
from outrider.cli.app import app
from outrider.config import CoordinatorSettings

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
    assert lines["coordinator.evidence"][:2] == ["sparse", "default"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["config", "--set", "coordinator.prot=1"], "did you mean coordinator.port?"),
        (["config", "--set", "port"], "SECTION.KEY=VALUE"),
        (["config", "--speculative-config", '{"num_spec": 1}'], "speculative_config.num_spec"),
        (["config", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["serve"], "target.model: must be set"),
        (["serve", "/nowhere"], "target model: /nowhere does not exist"),
        (["serve", "MODEL", "--draft-model", "/nowhere"], "draft model: /nowhere does not exist"),
        (["serve", "MODEL", "-k", "-1"], "coordinator.num_speculative_tokens"),
        (["serve", "MODEL", "--acceptance-method", "hope"], "coordinator.acceptance_method"),
        (["serve", "MODEL", "--device", "tpu"], "target.device"),
        (
            ["serve", "MODEL", "--speculative-config", '{"draft_tensor_parallel_size": 2}'],
            "draft.tensor_parallel_size",
        ),
        (["serve", "MODEL", "--port", "PORT"], "127.0.0.1:PORT is in use"),
        (["generate", "x", "-a", "127.0.0.1:1", "--timeout", "5"], "127.0.0.1:1"),
        (["generate", "x", "--logit-bias", "7"], "logit_bias: should be ID=BIAS"),
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
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr
