"""The parts of the figures: names, and one part with tiny models from services to table."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.benchmarks.schema import load
from outrider.model_executor.synthetic.recipe import Recipe, write_recipe


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli", "bench", "figures", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_every_part_and_row_has_a_name_of_its_own() -> None:
    from outrider.benchmarks.figures.parts import PARTS

    rows = [row.name for part in PARTS for row in part.rows]
    assert len(set(rows)) == len(rows)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    refused = measure(str(tmp_path), "pigeon")
    assert refused.returncode == 1
    assert "PART: 'pigeon' is no part and no row; parts are users, " in refused.stderr


@pytest.mark.parametrize(("flags", "told"), [
    ((), "skipped: no --vllm COMMAND"),
    (("--vllm", "echo 8 users: 3.21 ms a token"), "8 users: 3.21 ms a token"),
])  # fmt: skip
def test_the_lines_of_a_peer_are_in_the_table(tmp_path: Path, flags: tuple[str, ...], told: str) -> None:
    done = measure(str(tmp_path), "vllm", "--tiny", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split(maxsplit=1) == ["vllm", told]


def test_a_peer_that_fails_is_a_failure(tmp_path: Path) -> None:
    done = measure(str(tmp_path), "vllm", "--tiny", "--vllm", "sh -c 'echo broken >&2; exit 3'")
    assert done.returncode == 1
    assert "FAILED: exit 3: broken" in done.stdout


def test_acceptance_falls_in_the_middle_of_the_output(tmp_path: Path) -> None:
    from outrider.benchmarks.figures.services import token_before_fall

    recipe = Recipe("target", 1.0, later_acceptance=0.0)
    write_recipe(tmp_path, recipe)
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    pair, token = recipe.map_of(512), token_before_fall(tmp_path, 8)
    agrees = []
    for _ in range(16):
        agrees.append(bool(pair.agrees[token]))
        token = pair.target_next[token]
    assert agrees == [True] * 8 + [False] * 8


def test_chosen_lengths_are_measured_with_sampled_requests_of_both_arms(tmp_path: Path) -> None:
    from outrider.benchmarks.figures.measuring import load_command
    from outrider.benchmarks.figures.parts import find_parts
    from outrider.benchmarks.figures.rows import LoadRow
    from outrider.benchmarks.figures.session import MeasuringSession

    (part,) = find_parts(["sampled-chosen-users32"], most_cards=1)
    (row,) = part.rows
    assert isinstance(row, LoadRow) and not row.services.flags, "the controller chooses"
    command = load_command(MeasuringSession(tmp_path, "h100", False, {}), row, ("127.0.0.1:1", None))
    assert {"--baseline", "--temperature=0.7", "--top-p=0.8", "--top-k=20"} <= set(command)
    assert not {"--also-sampling", "--gate-prompts", "--num-speculative-tokens"} & set(command)


@pytest.mark.integration
def test_a_part_with_tiny_models_ends_with_its_table(tmp_path: Path) -> None:
    done = measure(str(tmp_path), "first-token", "--tiny", "--commit", "a" * 40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("first-token-8000 ")
    saved = load(tmp_path / "benchmarks/results/tiny-first-token-8000.json")
    assert saved.environment.commit == "a" * 40
    assert saved.configuration["pair"] == "tiny (synthetic) / tiny-draft (synthetic)"
    again = measure(str(tmp_path), "first-token", "useless-users8", "--tiny", "--table-only")
    assert again.stdout.splitlines()[-2:] == [done.stdout.splitlines()[-1], f"{'useless-users8':<26} not measured"]


@pytest.mark.integration
def test_a_part_ends_at_its_limit(tmp_path: Path) -> None:
    done = measure(str(tmp_path), "users8", "--tiny", "--limit-s", "1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("users8 ")
    assert "FAILED" in done.stdout
