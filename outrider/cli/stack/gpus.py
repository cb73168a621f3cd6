"""GPUs of this host, queried from torch in a separate process.

``outrider serve`` places the models before it starts anything, and does not import torch itself. Without an NVIDIA
driver no process is started.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_TIMEOUT_S = 120.0
"""The first import of torch from a cold disk takes long."""
QUESTION = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(index) for index in range(count)]
memory = [torch.cuda.get_device_properties(index).total_memory for index in range(count)]
print(json.dumps({"names": names, "memory": memory, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs that torch can use here, in CUDA's order."""

    names: tuple[str, ...] = ()
    """Names such as "NVIDIA H200"; the index is N of cuda:N."""
    memory_bytes: tuple[int, ...] = ()
    """Total memory of each."""
    problem: str = ""
    """Reason why no GPU can be used although a driver is installed; empty otherwise."""

    def __len__(self) -> int:
        return len(self.names)


NO_GPUS = Gpus()


def find_gpus() -> Gpus:
    """The GPUs of this host that ``CUDA_VISIBLE_DEVICES`` allows; none without a driver."""
    if not has_driver():
        return NO_GPUS
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return _gpus(json.loads(answer.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Gpus(problem=f"torch did not say which GPUs it can use: {_reason(error)}")


def has_driver() -> bool:
    """True if NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _gpus(facts: dict[str, object]) -> Gpus:
    names, memory = facts["names"], facts["memory"]
    if isinstance(names, list) and isinstance(memory, list) and names:
        return Gpus(tuple(map(str, names)), tuple(map(int, memory)))
    if facts["cuda"] is None:
        return Gpus(problem=f"torch {facts['torch']} is built without CUDA")
    return Gpus(problem=f"torch {facts['torch']} finds no usable GPU: see `nvidia-smi` and CUDA_VISIBLE_DEVICES")


def _reason(error: Exception) -> str:
    written = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (written or str(error)).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
