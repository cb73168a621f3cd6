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
        if name.partition(".")[0] in {"torch", "tokenizers", "grpc_health", "starlette", "yaml"}:
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


LACKING = "torch, tokenizers and grpcio-health-checking, which are not installed: pip install -e"
WITH_GATEWAY = "torch, tokenizers, grpcio-health-checking and starlette, which are not installed: pip install -e"
NO_PAIR = "; the embedded pair is not installed: add the wheel outrider_demo_pair of this release, or use a clone"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["demo"], [f'the demonstration needs {LACKING} ".[engine]"', NO_PAIR]),
        (["trace", "--demo"], [f'the demonstration needs {LACKING} ".[engine]"', NO_PAIR]),
        (["bench", "serve"], [f'this benchmark needs {LACKING} ".[engine]"', NO_PAIR]),
        (["serve", "/x"], [f'starting the services needs {WITH_GATEWAY} ".[engine,gateway]"']),
        (["serve", "/x", "--config", "/y"], [f'starting the services needs {WITH_GATEWAY} ".[engine,gateway]"']),
        (["serve", "/x", "--metrics-port", "9"], [f'starting the services needs {WITH_GATEWAY} ".[engine,gateway]"']),
    ],
)
def test_a_command_names_all_that_is_missing_before_anything_else(command: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PAIR, "outrider.cli", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {said[0]}")
    assert all(part in done.stderr for part in said)
    assert len(done.stderr.splitlines()) == 1
