"""Progress of a long operation: a bar on a terminal, otherwise a few log lines."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_log = logging.getLogger(__name__)

_LONGEST_SILENCE_S = 5.0
"""Logged at the end, and when nothing was for this time."""


class CountProgress:
    """Progress in counts; called with (done, total). The bar disappears at the end, or when ``stop`` is called."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar = _bar(self._amounts()) if sys.stderr.isatty() else None
        self._task: TaskID | None = None
        self._done = 0
        self._last_said = ""
        self._said_at: float | None = None
        """Time of the last line, or of the first call."""

    def __call__(self, done: int, total: int) -> None:
        """Show it."""
        if self._bar is None:
            self._log(done, total)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._what)
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        """Remove the bar; a later call starts a new one."""
        if self._bar is None:
            return
        self._bar.stop()
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def _log(self, done: int, total: int) -> None:
        if done < self._done:  # it began anew
            self._last_said = ""
        self._done = done
        self._said_at = time.monotonic() if self._said_at is None else self._said_at
        is_due = done >= total or time.monotonic() - self._said_at > _LONGEST_SILENCE_S
        if is_due and (said := self._say(done, total)) != self._last_said:
            self._last_said, self._said_at = said, time.monotonic()
            _log.info("%s: %s", self._what, said, extra={"fields": {"done": done, "total": total}})

    def _amounts(self) -> ProgressColumn:
        return MofNCompleteColumn()

    def _say(self, done: int, total: int) -> str:
        return f"{done} of {total}"


class ByteProgress(CountProgress):
    """Progress in bytes."""

    def _amounts(self) -> ProgressColumn:
        return DownloadColumn()

    def _say(self, done: int, total: int) -> str:
        return f"{done >> 20} of {total >> 20} MiB"


def _bar(amounts: ProgressColumn) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), amounts, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
