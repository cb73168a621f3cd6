"""Environment of a result: machine, code and versions.

Owns the asking. Nothing that identifies a person, a host or a path is recorded.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from outrider.benchmarks.schema import Environment

_PACKAGES = ("outrider", "torch", "transformers", "triton", "grpcio", "protobuf", "numpy", "uvloop")
_ROOT = Path(__file__).parents[2]


def describe_environment(device: str) -> Environment:
    """The environment of this process; `device` is where the models run, as the caller knows it."""
    commit, has_local_changes = measured_commit()
    return Environment(
        commit=commit,
        has_local_changes=has_local_changes,
        device=device_name(device),
        cpu=_cpu(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        platform=f"{platform.system()} {platform.machine()}",
        versions={"python": platform.python_version(), **_versions()},
    )


def measured_commit(environ: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """Commit of the code, and whether files of it were changed: ``GIT_COMMIT``'s, else the checkout's.

    The variable is for copies without git, as ``git describe --always --abbrev=40 --dirty --exclude='*'`` prints it.
    """
    stated = environ.get("GIT_COMMIT", "")
    if stated:
        return stated.removesuffix("-dirty"), stated.endswith("-dirty")
    # Results that are being written do not change what was measured.
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results"))


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def device_name(device: str) -> str:
    """A device in words: "cuda:0" is the name of the card where this process can see it."""
    if not device.startswith("cuda"):
        return device
    torch = sys.modules.get("torch")  # who measures a GPU in this process has imported it
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    listed = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return listed[0] if listed else device


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor()


def _git(*arguments: str) -> str:
    """Output of git for this file's checkout; empty outside of one."""
    return _output("git", "-C", str(_ROOT), *arguments)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
