"""Heads compute with as many threads as were set, in whatever thread they are served."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from outrider.model_executor.device_setup import prepare_device
from outrider_draft.proposers.base import Proposer
from outrider_draft.proposers.medusa import MedusaProposer
from outrider_draft.proposers.mlp_speculator import MlpSpeculatorProposer
from tests.draft_service.test_state_heads import HIDDEN, medusa, request, settings, speculator

NAME = "proposes"


def num_threads_of_that_name() -> int:
    """Threads that bear the name, which a thread passes on to those that it starts; others come and go meanwhile."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text(encoding="utf-8").strip() == NAME
    return count


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
    found: list[int] = []

    def propose() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME, encoding="utf-8")
        proposer.propose(asked)
        found.append(num_threads_of_that_name())

    thread = threading.Thread(target=propose)
    thread.start()
    thread.join()
    assert found == [1]
