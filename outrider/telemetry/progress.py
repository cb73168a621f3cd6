"""How far something long has come: a bar on a terminal, a few log lines everywhere else."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_log = logging.getLogger(__name__)

_LOGGED_SHARE = 4
"""Logged at every quarter."""


class ByteProgress:
    """Called with (bytes done, bytes in all); the bar is gone when all are done or ``stop`` is called."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar = _bar() if sys.stderr.isatty() else None
        self._task: TaskID | None = None
        self._last_logged = 0

    def __call__(self, done: int, total: int) -> None:
        """Show it."""
        if self._bar is None:
            self._log(done, total)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=total)
        self._bar.update(self._task, completed=done)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _log(self, done: int, total: int) -> None:
        quarter = _LOGGED_SHARE * done // total if total else _LOGGED_SHARE
        if quarter > self._last_logged:
            self._last_logged = quarter
            _log.info("%s: %d of %d MiB", self._what, done >> 20, total >> 20)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
