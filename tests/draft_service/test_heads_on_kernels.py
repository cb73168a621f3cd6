"""Heads through the kernels of a GPU; see ``heads_on_kernels``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_drafts_through_kernels_are_those_of_the_papers(tmp_path: Path) -> None:
    """A process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.draft_service.heads_on_kernels", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
