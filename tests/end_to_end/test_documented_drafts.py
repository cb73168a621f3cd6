"""Ways to draft that documents show, as users run them: a proposer of their own, and the demonstration of heads."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import Client
from tests.end_to_end.commands import DEADLINE_S, Command, wait_until
from tests.end_to_end.test_greedy import NUM_ROWS, NUM_TOKEN_IDS, reference
from tests.support.tiny_models import cached_tiny_model

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

ROOT = Path(__file__).parents[2]
PROMPT = [7, 7, 7, 7]


def test_the_proposer_of_the_page_for_users_is_served(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "proposers.md").read_text(encoding="utf-8")
    (tmp_path / "repeat_last.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    model = cached_tiny_model("llama", seed=1)
    command = Command(
        *("--model", str(model), "--method", "repeat_last:RepeatLast", "--device", "cpu"),
        *("--dtype", "float32", "--num-speculative-tokens", "3"),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    with contextlib.closing(command), Client(command.address()) as client:
        settings: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        expected = reference(model, PROMPT, 24, padding=range(NUM_TOKEN_IDS, NUM_ROWS))

        def is_drafted() -> bool:
            result = client.generate(prompt_token_ids=PROMPT, **settings)
            assert list(result.token_ids) == expected
            return bool(result.speculation.num_draft_tokens)

        # The controller begins with drafts once the draft has the text, which may be when a short stream has ended.
        wait_until(is_drafted, "a stream with drafts")
        assert client.model_info().draft_model == "repeat_last:RepeatLast"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_the_demonstration_runs_with_a_head(method: str) -> None:
    arguments = ["demo", "--method", method, "--device", "cpu", "--max-tokens", "16", "--runs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("16 tokens, equal") >= 3, done.stdout
    rows = re.findall(r"^\s*(0|0\.8)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+([\d.]+)\s+([\d.]+)\s+", done.stdout, re.MULTILINE)
    assert [temperature for temperature, _, _ in rows] == ["0", "0.8"], done.stdout
    assert all(float(rate) > 0.2 and float(length) > 1.4 for _, rate, length in rows), done.stdout
