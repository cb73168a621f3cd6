"""Switches of a process: set before gRPC begins, and never over what the environment says."""

import gc
import os

import grpc
import pytest

from outrider.process.tuning import prepare_process, settle_process


def test_the_poller_is_chosen_for_known_releases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setattr(grpc, "__version__", "9.0.0")
    prepare_process()
    assert "GRPC_EXPERIMENTS" not in os.environ
    monkeypatch.setattr(grpc, "__version__", "1.85.1")
    prepare_process()
    assert "-event_engine_client" in os.environ["GRPC_EXPERIMENTS"]
    monkeypatch.delenv("GRPC_EXPERIMENTS")


def test_fork_handlers_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "mine")
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    prepare_process()
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "false"


def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "mine")
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "true")
    prepare_process()
    assert os.environ["GRPC_EXPERIMENTS"] == "mine"
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "true"


def test_what_is_there_to_stay_is_not_collected_again() -> None:
    try:
        settle_process()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
