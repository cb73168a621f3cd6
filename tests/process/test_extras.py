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

WITHOUT_PAIR = WITHOUT.replace(
    "runpy.run_module", "import outrider.demo\noutrider.demo.TARGET /= 'no'\nrunpy.run_module"
)


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
    assert done.stderr.endswith(f'or pip install "WHEEL[{extra}]" with its wheel\n')
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["demo"], 'error: the demonstration needs torch, which is not installed: pip install -e ".[engine]"'),
        (["trace", "--demo"], 'error: the demonstration needs torch, which is not installed: pip install -e ".[engine'),
        (
            ["serve", "/x"],
            "error: starting the services needs torch and starlette, which are not installed: pip install -e"
            ' ".[engine,gateway]"',
        ),
    ],
)
def test_a_command_without_its_extras_names_them_before_anything_else(command: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PAIR, "outrider.cli", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
