"""Descriptions of drafts name the device they compute on: a coordinator lets those on one GPU take turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider.model_executor.device_setup import DeviceFacts, device_facts
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, load_proposer
from tests.draft_service.head_rig import served
from tests.draft_service.test_state_heads import medusa, settings, speculator
from tests.support.eagle3 import build_eagle3
from tests.support.tiny_models import cached_tiny_model

SHARED: DeviceFacts = {"device": "cuda:0", "device_id": "GPU-1", "device_name": "A GPU"}
PROPOSERS = "outrider_draft.proposers"


def pretend(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(sys.modules[module], "device_facts", lambda device: SHARED)


def facts_of(proposer: ServedProposer) -> DeviceFacts:
    found = proposer.description
    return {"device": found.device, "device_id": found.device_id, "device_name": found.device_name}


def test_of_a_head_with_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cached_tiny_model("llama", seed=1)
    build_eagle3(tmp_path / "head")
    assert facts_of(served("eagle3", tmp_path / "head", target)) == device_facts(torch.device("cpu"))
    pretend(monkeypatch, f"{PROPOSERS}.heads")
    assert facts_of(served("eagle3", tmp_path / "head", target)) == SHARED


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_of_heads_without_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    (medusa if method == "medusa" else speculator)(tmp_path / "d")
    load_proposer(settings(method, tmp_path / "d"), LoadHooks())  # imports the module
    pretend(monkeypatch, f"{PROPOSERS}.{method}")
    assert facts_of(load_proposer(settings(method, tmp_path / "d"), LoadHooks())) == SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_known_by_its_uuid() -> None:
    facts = device_facts(torch.device("cuda"))
    assert facts["device_id"] == str(torch.cuda.get_device_properties(0).uuid)
    assert facts["device_name"]
