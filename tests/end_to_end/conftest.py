"""A stack of real processes, shared by all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import Client
from tests.end_to_end.commands import PATIENT, Command
from tests.support.tiny_models import cached_tiny_model


@pytest.fixture(scope="session")
def tiny_pair() -> tuple[Path, Path]:
    """A target and a draft that is like it, with room for long streams."""
    model = cached_tiny_model("llama", seed=1, max_position_embeddings=8192)
    return model, model


class Served:
    """One command for all tests; a new one when a test has ended it."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._arguments = (
            str(target),
            "--draft-model",
            str(draft),
            "-k",
            "3",
            "-v",
            *PATIENT,
            "--set",
            "coordinator.drain_delay_s=10",  # for the questions of a test on a busy machine
            "--set",
            "coordinator.draft_length=fixed",  # a test pair need not be worth drafting for
        )
        self._command: Command | None = None

    def running(self) -> Command:
        if self._command is None or self._command.process.poll() is not None:
            self._command = Command(*self._arguments)
            self._command.attached()
        return self._command

    def close(self) -> None:
        if self._command is not None:
            self._command.close()


@pytest.fixture(scope="session")
def serving(tiny_pair: tuple[Path, Path]) -> Iterator[Served]:
    served = Served(*tiny_pair)
    yield served
    served.close()


@pytest.fixture
def served(serving: Served) -> Command:
    """`outrider serve` on the tiny pair, ready; it may be ended."""
    return serving.running()


@pytest.fixture
def client(served: Command) -> Iterator[Client]:
    with Client(served.address()) as client:
        yield client
