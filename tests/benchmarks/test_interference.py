"""Gaps beside a prefill, and the whole scenario against a real pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.schema import load
from outrider.benchmarks.serving import schemas
from outrider.benchmarks.serving.gate import OutputGateError
from outrider.benchmarks.serving.interference import BESIDE, InterferencePlan, gaps_within, run_plan, to_result
from outrider.benchmarks.serving.load import Decoding
from outrider.benchmarks.serving.records import Record
from outrider.benchmarks.serving.workload import random_prompts
from outrider.benchmarks.tables import render
from outrider.cli.bench import app
from outrider.errors import ConfigError, UnavailableError
from tests.benchmarks.scripted_client import ScriptedClient


def test_gaps_count_when_they_share_a_moment_with_a_prefill() -> None:
    record = Record(4, 0.0, 9.0, token_times=(1.0, 2.0, 4.0, 7.0, 8.0), token_counts=(1,) * 5)
    assert gaps_within(record, []) == []
    assert gaps_within(record, [(2.5, 3.0)]) == [2.0]
    assert gaps_within(record, [(1.5, 2.5), (7.5, 20.0)]) == [1.0, 2.0, 1.0]
    assert gaps_within(record, [(8.0, 9.0)]) == []


async def test_both_arms_are_measured_and_the_ratio_is_of_their_p99() -> None:
    client = ScriptedClient()
    running, arriving = random_prompts(3, 5, 100, seed=1), random_prompts(2, 50, 100, seed=2)
    plan = InterferencePlan(tuple(running), tuple(arriving), Decoding(max_tokens=40), num_runs=2)
    outcome = await run_plan(client, plan)
    assert len(outcome.alone) == 2 * 3 * 19
    assert 0 < len(outcome.beside) <= 2 * 3 * 19
    result = to_result(outcome, plan, name="some", device="cpu", configuration={"pair": "a"})
    assert result.figures["p99_ratio"] == outcome.p99_ratio
    found = result.find("itl", arm=BESIDE)
    assert found is not None
    assert found.samples == outcome.beside
    assert "| a | 3 | 3 | 50 |" in render([result])


async def test_nothing_is_timed_while_speculation_changes_the_output() -> None:
    client = ScriptedClient(lie_at=3)
    plan = InterferencePlan(tuple(random_prompts(3, 5, 100, seed=1)), ((1, 2),), Decoding(max_tokens=40), num_runs=2)
    with pytest.raises(OutputGateError, match="log-probabilities"):
        await run_plan(client, plan)
    assert len(client.requests) == 3, "both arms of the first prompt, and the question how far apart the tokens are"


async def test_a_long_prompt_that_fails_is_told() -> None:
    plan = InterferencePlan(((1, 2),), ((7,) * 9,), Decoding(max_tokens=250), num_runs=1)
    with pytest.raises(UnavailableError, match="a long prompt failed: no room"):
        await run_plan(ScriptedClient(fail_prompts=frozenset({7})), plan)


@pytest.mark.integration
def test_the_command_runs_the_embedded_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--num-running", "2", "--output-len", "48", "--prefill-len", "300", "--runs", "1", "--save", "some"]
    result = CliRunner().invoke(app, ["interference", *arguments, "--set", "target.num_threads=1"])
    assert result.exit_code == 0, result.output
    assert "p99 over p99:" in result.stdout
    assert load(tmp_path / "benchmarks/results/some.json").figures["p99_ratio"] > 0


async def test_schemas_arrive_beside_running_streams_and_are_new_each_time(tmp_path: Path) -> None:
    (tmp_path / "schemas.jsonl").write_text('{"schema": {"type": "object"}}\n{"type": "array"}\n')
    plan = schemas.SchemaPlan(
        running=((5,), (6,)),
        decoding=Decoding(max_tokens=40),
        schemas=schemas.read_schemas(tmp_path / "schemas.jsonl"),
        num_arriving=3,
        arrival_rate=1e6,
        num_runs=2,
        start_s=0,
    )
    client = ScriptedClient()
    found = await schemas.run_schemas(client, plan)
    assert list(found.gaps) == [schemas.ALONE, schemas.BESIDE_REQUESTS, schemas.BESIDE_SCHEMAS]
    assert [len(longest) for longest in found.longest.values()] == [2, 2, 2]
    given = [str(options["json_schema"]) for options in client.requests if "json_schema" in options]
    assert len(set(given)) == len(given) == 6
    with pytest.raises(ConfigError, match="no JSON object a line"):
        schemas.read_schemas(tmp_path / "missing")
