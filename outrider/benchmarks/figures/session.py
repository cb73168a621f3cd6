"""One run of ``outrider bench figures``: its folder, environment, time limit and processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""Root of the checkout."""


@dataclass(slots=True)
class MeasuringSession:
    """Session of measuring: folder, devices and sizes."""

    out: Path
    name: str
    """Beginning of the results' names."""
    is_tiny: bool
    environment: dict[str, str]
    vllm: str | None = None
    """Command that measures vLLM."""
    logs_choices: bool = False
    """The log of services tells every choice of draft lengths, and what it went by."""
    deadline: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    """Error messages by row."""

    @property
    def device(self) -> str:
        """Device of the models."""
        return "cpu" if self.is_tiny else "cuda"

    @property
    def dtype(self) -> str:
        """Type of the models."""
        return "float32" if self.is_tiny else "bfloat16"

    @property
    def results(self) -> Path:
        """Folder of the results."""
        return self.out / "benchmarks/results"

    def results_of(self, row: str) -> list[Path]:
        """Result files of one row; some commands write one for each phase."""
        path = self.results / f"{self.name}-{row}.json"
        return [path] if path.exists() else sorted(self.results.glob(f"{path.stem}-[0-9]-*.json"))

    def log(self, name: str) -> Path:
        """A log's path."""
        return self.out / "logs" / f"{name}.log"

    def command(self, *words: str) -> list[str]:
        """Command line of this Python, without the folder it runs in."""
        return [sys.executable, "-P", *words]

    def run(self, command: list[str], log: str) -> None:
        """Wait for it until the part's time is up; ``RuntimeError`` with the log's last lines if it fails."""
        path = self.log(log)
        with path.open("w") as written:
            process = self.start(command, written.fileno())
            try:
                code = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                stop(process)
        if code:
            raise RuntimeError(f"{'the part took too long' if code == -1 else f'exit {code}'}: {_last_lines(path)}")

    def start(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        """A process in a group of its own, in the folder of the results."""
        return subprocess.Popen(
            command, cwd=self.out, env=self.environment, stdout=output, stderr=output, start_new_session=True
        )

    def start_until(self, ready: str, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """The process, once its log says so; ``RuntimeError`` if it ends before, or takes too long."""
        path = self.log(log)
        with path.open("w") as written:
            process = self.start(command, written.fileno())
        while not re.search(ready, path.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > self.deadline:
                stop(process)
                raise RuntimeError(f"not started: {_last_lines(path)}")
            time.sleep(0.5)
        return process


def _last_lines(path: Path) -> str:
    return " / ".join(path.read_text(errors="replace").strip().splitlines()[-3:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, and all that it started and left behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of(given: Mapping[str, str], num_cards: int, commit: str | None) -> dict[str, str]:
    """Environment of all processes: our packages, the cards, and the commit."""
    folders = [ROOT, *(ROOT / name for name in ("coordinator", "draft_service", "target_service"))]
    paths = os.pathsep.join([*map(str, folders), given.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    cards = given.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_cards)))
    chosen = ",".join(cards.split(",")[:num_cards])
    told = {"GIT_COMMIT": commit} if commit else {}
    return {**given, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": chosen, **told}
