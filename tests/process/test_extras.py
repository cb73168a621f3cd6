"""A service started by its module without the extras that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.config import service_module

WITHOUT = """
import runpy, sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "tokenizers", "grpc_health", "starlette"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("section", "extra"),
    [("target", "engine"), ("draft", "engine"), ("coordinator", "coordinator"), ("gateway", "gateway")],
)
def test_a_module_without_its_extra_ends_with_one_line(section: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, service_module(section)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(f"error: the {section} service needs ")
    assert done.stderr.endswith(f"install outrider[{extra}]\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["demo"], ["trace", "--demo"]])
def test_a_demonstration_without_its_extra_ends_with_one_line(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "outrider.cli", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the demonstration needs torch, which is not installed: install outrider[")
    assert len(done.stderr.splitlines()) == 1
