"""A tiny draft model, loaded for each test, so that its page tables are empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.model_executor.model_runner import ModelRunner
from outrider_draft.proposers.draft_model import ModelProposer
from tests.support.service_rig import tiny_reference, tiny_runner  # noqa: F401 - fixtures
from tests.support.tiny_models import cached_tiny_model


@pytest.fixture(scope="session")
def folder() -> Path:
    return cached_tiny_model("llama", seed=2)


@pytest.fixture
def proposer(runner: ModelRunner) -> ModelProposer:
    return ModelProposer(runner)
