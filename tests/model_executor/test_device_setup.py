"""What device "auto" stands for, asked of torch by a service that is started alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.config import TargetSettings, load
from outrider.errors import ConfigError
from outrider.model_executor.device_setup import resolve_device
from outrider.model_executor.distributed.runner import open_runner


@pytest.mark.parametrize(("is_there", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_a_gpu_where_there_is_one(is_there: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    assert resolve_device("auto") == expected
    assert resolve_device("cuda:3", 2) == "cuda:3"
    assert resolve_device("cpu", 2) == "cpu"


def test_a_model_is_split_on_the_cpu_only_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="tensor_parallel_size: is 2, and torch finds no GPU"):
        resolve_device("auto", 2)


def test_a_share_of_a_gpu_is_refused_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="gpu_memory_utilization: is set, and torch finds no GPU"):
        open_runner(load(TargetSettings, ["--model", str(tmp_path), "--gpu-memory-utilization", "0.5"], {}))
