"""The parts of the figures: names, and one part with tiny models from services to table."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "measure_figures.py"


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False, timeout=280)


def test_every_part_and_row_has_a_name_of_its_own() -> None:
    from figures.parts import PARTS

    rows = [row.name for part in PARTS for row in part.rows]
    assert len(set(rows)) == len(rows)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    refused = measure(str(tmp_path), "pigeon")
    assert refused.returncode == 2
    assert "pigeon" in refused.stderr


@pytest.mark.timeout(300)
def test_a_part_with_tiny_models_ends_with_its_table(tmp_path: Path) -> None:
    done = measure(str(tmp_path), "first-token", "--tiny", "--commit", "a" * 40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("first-token-8000 ")
    saved = (tmp_path / "benchmarks/results/tiny-first-token-8000.json").read_text()
    assert f'"commit": "{"a" * 40}"' in saved
