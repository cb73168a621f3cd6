"""Loads of a measured pair on the real coordinator and engine cores."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "play_measured_pair.py"


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False, timeout=120)


def test_loads_with_and_without_drafts_are_played_and_choices_told(tmp_path: Path) -> None:
    size = ("--users", "3", "--prompt-tokens", "300", "--output-tokens", "24", "--runs", "1")
    done = play("--pair", "MeasuredLongContexts", *size, "--choices", str(tmp_path / "choices"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["2", "warm-up", "chosen", "plain", "chosen"]
    assert "draft lengths were chosen: {'sessions': " in (tmp_path / "choices").read_text()


def test_a_pair_that_was_not_measured_is_refused() -> None:
    refused = play("--pair", "Pigeon")
    assert refused.returncode == 2
    assert "Pigeon is no measured pair" in refused.stderr
