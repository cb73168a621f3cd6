"""Switches of a process: set before gRPC reads them, and never over what the environment says."""

import gc
import importlib.metadata
import os
import subprocess
import sys

import pytest

from outrider.process.tuning import freeze_objects, grpc_environment, permanent_imports

_MAINS = [
    *("outrider_coordinator.__main__", "outrider_draft.__main__", "outrider_target.__main__"),
    *("outrider.gateway.__main__", "outrider.cli.app", "outrider.benchmarks.step.service"),
]
_WHEN_IMPORTED = """
import importlib, importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"), os.environ["GRPC_ENABLE_FORK_SUPPORT"])

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
import grpc
"""


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPC_EXPERIMENTS", "GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("module", _MAINS)
def test_the_variables_are_set_when_grpc_is_imported(module: str) -> None:
    """gRPC reads them then, and never again."""
    done = subprocess.run([sys.executable, "-c", _WHEN_IMPORTED, module], capture_output=True, text=True, check=True)
    expected = grpc_environment()
    assert done.stdout.split("\n")[0] == f"{expected.get('GRPC_EXPERIMENTS')} false"


def test_the_poller_is_chosen_for_known_releases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.0.0")
    assert "GRPC_EXPERIMENTS" not in grpc_environment()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.85.1")
    assert "-event_engine_client" in grpc_environment()["GRPC_EXPERIMENTS"]


def test_an_environment_without_grpc_is_prepared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert grpc_environment() == {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}


def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "mine")
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "true")
    os.environ.update(grpc_environment())
    assert os.environ["GRPC_EXPERIMENTS"] == "mine"
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "true"


def test_what_is_there_to_stay_is_not_collected_again() -> None:
    before, kept = gc.get_freeze_count(), [[number] for number in range(1000)]
    freeze_objects()
    assert gc.get_freeze_count() >= before + len(kept)


def test_what_imported_modules_make_is_never_scanned() -> None:
    before = gc.get_freeze_count()
    with permanent_imports():
        kept = [[number] for number in range(1000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
