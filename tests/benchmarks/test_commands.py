"""`outrider bench` as a user types it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.benchmarks.schema import load
from outrider.benchmarks.tables import render
from outrider.cli.bench import app
from outrider.cli.bench.harness import table
from outrider.cli.bench.pairs import find_pair
from tests.support.tiny_models import cached_tiny_model


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_rpc_prints_a_line_a_case_and_saves_the_samples(runner: CliRunner, tmp_path: Path) -> None:
    arguments = ["rpc", "--num-bytes", "200", "--call", "stream", "--samples", "4", "--warmups", "0", "--save", "wire"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()[1:]
    assert [line.split()[:4] for line in rows] == [["stream", "tcp", "200", "16"], ["stream", "unix", "200", "16"]]
    saved = load(tmp_path / "benchmarks/results/wire.json")
    assert [len(series.samples) for series in saved.series] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rpc", "--save", "a/b"], "not a path"),
        (["engine", "--load-format", "magic"], "safetensors, dummy, synthetic"),
        (["kernels", "--device", "cuda:99"], "there "),
        (["kernels", "--device", "banana"], "should be auto, cpu, cuda or cuda:N"),
        (["serve", "--draft-model", "some"], "needs its target"),
        (["http", "a=nothing"], "'nothing' should be an address such as http://"),
        (["ahead-modes", "--users", "1", "--arm", "apart"], "'apart' should have the MODE in_turn or verdict"),
        (["ahead-modes", "--users", "1", "--arm", "one:chain:0"], "with a K of at least 1"),
        (["serve", "--json", "nowhere/some.json"], "nowhere is not a folder"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(runner: CliRunner, arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code in {1, 2}
    assert words in " ".join(result.output.replace("│", " ").split())


def test_engine_prints_the_floor_beside_each_case(runner: CliRunner, tmp_path: Path) -> None:
    folder = str(cached_tiny_model("llama"))
    arguments = ["engine", folder, "--context", "16", "--samples", "2", "--warmups", "0", "--save", "tiny"]
    result = runner.invoke(app, [*arguments, "--num-threads", "1"])
    assert result.exit_code == 0, result.output
    assert "copy bandwidth:" in result.stdout
    assert len([line for line in result.stdout.splitlines() if line.startswith(("forward", "draft loop"))]) == 3
    assert load(tmp_path / "benchmarks/results/tiny.json").configuration["synthetic"] is False


def test_engine_measures_a_shape_that_has_no_weights(runner: CliRunner, tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_bytes((cached_tiny_model("llama") / "config.json").read_bytes())
    arguments = ["engine", str(shape), "--context", "16", "--samples", "1", "--warmups", "0", "--num-threads", "1"]
    assert runner.invoke(app, arguments).exit_code == 1
    result = runner.invoke(app, [*arguments, "--load-format", "dummy", "--save", "noise"])
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "benchmarks/results/noise.json").configuration["load_format"] == "dummy"
    assert "Random weights (" in result.stdout


@pytest.mark.integration
def test_engine_measures_a_model_that_processes_share(runner: CliRunner, tmp_path: Path) -> None:
    folder = str(cached_tiny_model("llama"))
    arguments = ["engine", folder, "--context", "16", "--samples", "1", "--warmups", "0", "--num-threads", "1"]
    result = runner.invoke(app, [*arguments, "--tensor-parallel-size", "2", "--save", "shared"])
    assert result.exit_code == 0, result.output
    saved = load(tmp_path / "benchmarks/results/shared.json")
    assert saved.configuration["tensor_parallel_size"] == 2
    assert "shared by 2" in render([saved])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rpc", "--call", "pigeon"], "--call: should be unary or stream, not pigeon"),
        (["engine", "no-such-folder"], "no-such-folder"),
        (["serve", "no-such-folder"], "no-such-folder"),
        (["serve", "--address", "127.0.0.1:1", "--draft-model", "x"], "--draft-model"),
        (["serve", "--save", "x", "--gate-prompts", "0"], "gate"),
        (["serve", "--request-rate", "0"], "--request-rate"),
        (["serve", "--also-sampling", "warm"], "--also-sampling"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(runner: CliRunner, arguments: list[str], said: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_wheel_says_where_the_benchmarks_are(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["rpc"])
    assert result.exit_code == 1
    assert "benchmarks are not in the wheel" in result.stderr


@pytest.mark.slow
def test_serve_measures_three_real_processes(runner: CliRunner, tmp_path: Path) -> None:
    target = cached_tiny_model("llama", seed=1)
    arguments = ["serve", str(target), "--draft-model", str(target), "--baseline", "--runs", "2", "--num-prompts", "2"]
    sizes = ["--input-len", "8", "--output-len", "12", "--max-concurrency", "2", "-k", "3"]
    result = runner.invoke(app, [*arguments, *sizes, "--save", "tiny", "--json", str(tmp_path / "flat.json")])
    assert result.exit_code == 0, result.output
    assert "times as fast" in result.stdout
    saved = load(tmp_path / "benchmarks/results/tiny.json")
    assert saved.figures["speculation"]["completed"] == saved.figures["baseline"]["completed"] == 4
    # The draft is the target: every judged token is kept.
    assert saved.figures["speculation"]["outrider_acceptance"] == 1.0
    assert "spec_decode_num_drafts" not in saved.figures["baseline"]
    assert saved.configuration["gate"]["num_ties"] == 0
    flat = json.loads((tmp_path / "flat.json").read_text())
    assert flat["output_lens"] == [12] * 4


def test_of_services_that_ran_already_no_flag_tells_how_they_were_started() -> None:
    flags = {"device": "cuda", "load_format": "safetensors", "settings": []}
    assert find_pair(None, None, "127.0.0.1:1").stated(**flags) == {"device": "cuda"}
    assert find_pair(None, None, None).stated(**flags) == flags


def test_a_narrow_table_cuts_no_figure() -> None:
    written = io.StringIO()
    shown = table(("sessions", "between the forwards", "p99 ms"), [("32", 1234.5678, 115.878)])
    Console(width=20, file=written, soft_wrap=True).print(shown)
    assert {"sessions", "between", "forwards", "1234.568", "115.878"} <= set(written.getvalue().split())
