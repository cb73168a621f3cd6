"""The coordinator and the SDK work in an environment without torch; an environment without it is made here."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = ("torch", "transformers", "triton", "safetensors")

BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str, blocked: tuple[str, ...] = BLOCKED) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCKER}{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_blocker_blocks() -> None:
    outcome = run("import torch")
    assert outcome.returncode == 1
    assert "blocked: torch" in outcome.stderr


PACKAGES = ("outrider.client", "outrider.kv_cache", "outrider.transport", "outrider.cli.app", "outrider_coordinator")


def test_every_module_of_it_imports() -> None:
    """Imports in one process: a blocked module raises where it is first imported."""
    code = f"""
import importlib, pkgutil
import outrider
for name in {PACKAGES!r}:
    package = importlib.import_module(name)
    for item in pkgutil.walk_packages(getattr(package, "__path__", ()), name + "."):
        if not item.name.endswith("__main__"):
            importlib.import_module(item.name)
assert not set(BLOCKED) & set(sys.modules)
"""
    outcome = run(code)
    assert outcome.returncode == 0, outcome.stderr


SERVER_ONLY = (
    "numpy",
    "tokenizers",
    "jinja2",
    "cryptography",
    "uvloop",
    "huggingface_hub",
    "grpc_health",
    "grpc_reflection",
    "yaml",
    "starlette",
    "uvicorn",
    "httptools",
)


def test_the_base_install_imports_without_any_extra() -> None:
    """The SDK and every command: what a command needs besides is told when it runs."""
    outcome = run("import outrider, outrider.client, outrider.cli.app", (*BLOCKED, *SERVER_ONLY))
    assert outcome.returncode == 0, outcome.stderr


GRPC = "grpcio-health-checking, grpcio-reflection"
ENGINE = f"torch, transformers, safetensors, numpy, tokenizers, {GRPC}"
ALONE = f"torch, transformers, safetensors, numpy, tokenizers, {GRPC.replace(', ', ' and ')}"
INSTALL = "which are not installed: pip install -e "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "/m"], f'needs {ENGINE}, starlette, uvicorn, httptools and jinja2, {INSTALL}".[engine,gateway]"'),
        (["target"], f'needs {ALONE}, {INSTALL}".[engine]"'),
        (["coordinator"], f'needs numpy, tokenizers, jinja2, {GRPC.replace(", ", " and ")}, {INSTALL}".[coordinator]"'),
        (["demo"], f'needs {ALONE}, {INSTALL}".[engine]"'),
        (["bench", "serve"], f'this benchmark needs {ALONE}, {INSTALL}".[engine]"'),
    ],
)
def test_a_missing_extra_is_named_before_a_process_is_started(words: list[str], said: str) -> None:
    code = f"""
import subprocess
subprocess.Popen = None
from outrider.cli.app import app
app({words!r})
"""
    outcome = run(code, (*BLOCKED, *SERVER_ONLY))
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("error: ")
    assert said in outcome.stderr


def test_the_coordinator_process_runs_without_torch() -> None:
    """Start of the process, which reads its settings and says what is wrong with them: nothing of it needs torch."""
    code = """
import runpy
sys.argv = ["outrider coordinator", "--prot", "1"]
runpy.run_module("outrider_coordinator", run_name="__main__")
"""
    outcome = run(code)
    assert outcome.returncode == 1
    assert "--prot: is not a setting; did you mean --port?" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_importing_the_library_is_light() -> None:
    outcome = run("import outrider; assert not {'grpc', 'numpy.random', 'pydantic'} & set(sys.modules), 'heavy'")
    assert outcome.returncode == 0, outcome.stderr
