"""Heads compute with as many threads as were set, in whatever thread they are served."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from outrider.model_executor.device_setup import prepare_device
from outrider_draft.proposers.base import Proposer
from outrider_draft.proposers.medusa import MedusaProposer
from outrider_draft.proposers.mlp_speculator import MlpSpeculatorProposer
from tests.draft_service.test_state_heads import HIDDEN, medusa, request, settings, speculator


def native_threads() -> set[str]:
    """Ids of the process's threads that Python has not started."""
    tasks = {path.name for path in Path("/proc/self/task").iterdir()}
    return tasks - {str(thread.native_id) for thread in threading.enumerate()}


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_a_new_thread_starts_no_more_than_were_set(tmp_path: Path, method: str) -> None:
    proposer: Proposer
    if method == "medusa":
        medusa(tmp_path)
        proposer = MedusaProposer.load(settings(method, tmp_path))
    else:
        speculator(tmp_path)
        proposer = MlpSpeculatorProposer.load(settings(method, tmp_path))
    prepare_device("cpu", "auto", 1)
    asked = [request(torch.randn(3, HIDDEN), [1, 2, 3, 4], 3) for _ in range(8)]
    started = set[str]()

    def propose() -> None:
        before = native_threads()
        proposer.propose(asked)
        started.update(native_threads() - before)

    thread = threading.Thread(target=propose)
    thread.start()
    thread.join()
    assert not started
