"""The other ranks of this host, started by rank 0 of a service that was started alone.

Owns their processes: each is the service's own program with the service's own settings, told its rank by torchrun's
variables. None outlives rank 0, whose end closes their standard input; none is left uncollected.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from outrider.model_executor.distributed.rank_info import RankInfo, environment_of

OnEnd = Callable[[int, str], None]
"""Called with a rank and how it ended, from a thread."""


class LocalRanks:
    """Ranks 1 and up, running."""

    def __init__(self, command: Sequence[str], size: int, port: int, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._processes = {
            rank: subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                env=environment_of(RankInfo(rank, size, rank), port),
                process_group=0,  # an interrupt typed at a terminal is for rank 0, which ends them in order
            )
            for rank in range(1, size)
        }
        self._watchers = [
            threading.Thread(target=self._watch, args=item, name=f"rank-{item[0]}", daemon=True)
            for item in self._processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    def process_ids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def join(self, within_s: float) -> None:
        """Wait for all to end by themselves; those that do not are killed."""
        for watcher in self._watchers:
            watcher.join(within_s)
        self.kill()
        for watcher in self._watchers:
            watcher.join(within_s)

    def kill(self) -> None:
        """SIGKILL, now."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._on_end(
            rank, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
