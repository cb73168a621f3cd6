"""Device "auto", as torch resolves it for a service that is started alone, and the lock of a device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from outrider.config import TargetSettings, load
from outrider.errors import ConfigError
from outrider.kernels.linear.reference import can_pack
from outrider.model_executor.device_lock import device_lock
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


_GROWTH = """
import ctypes
import torch
from outrider.kernels.linear.reference import PackedWeight
from outrider.model_executor.device_setup import prepare_device

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena chunks fast maps mapped peak freed used free top".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Heap
prepare_device("cpu", "float32", 1)
weights = [PackedWeight(torch.ones(64, 16 * number)) for number in (1, 2, 3, 4)]

def meet(sizes):
    for rows in sizes:
        for number, weight in enumerate(weights):
            weight(torch.ones(rows, 16 * (number + 1)), None)
    return library.mallinfo2().used

with torch.inference_mode():
    first = meet(range(1, 41))
    print((meet(range(41, 201)) - first) / (1 << 20))
"""


@pytest.mark.skipif(sys.platform != "linux" or not can_pack(torch.float32), reason="needs glibc and oneDNN")
def test_a_process_that_meets_many_batch_sizes_keeps_a_bounded_number_of_products() -> None:
    """160 further sizes of four weights leave some 60 to 300 MiB without a bound."""
    done = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 15


DEVICE = "GPU-0"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "is_taken"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
@pytest.mark.usefixtures("own_folder")
def test_only_sharers_hold_it_together(first: bool, second: bool, is_taken: bool) -> None:
    with device_lock(DEVICE, is_shared=first) as is_first_taken:
        assert is_first_taken
        with device_lock(DEVICE, is_shared=second, patience_s=0.0) as found:
            assert found is is_taken
        with device_lock("GPU-1", patience_s=0.0) as is_free:
            assert is_free
    with device_lock(DEVICE, patience_s=0.0) as is_free:
        assert is_free


def test_a_folder_that_cannot_be_written_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with device_lock(DEVICE) as is_taken:
        assert not is_taken
