"""Bars on a terminal while services start: what each does, how far it has come, for how long.

Owns what is drawn. How far a service has come is read from its log by whoever calls this.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartBars:
    """One bar a service, from its start until it serves; they are gone when all do."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def begin(self, name: str) -> None:
        """The service is being started."""
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"{name}: starting", total=None)

    def show(self, name: str, message: str, done: int, total: int) -> None:
        """It has come so far with what the message says."""
        if name in self._tasks:
            described = f"{name}: {message}"
            self._bars.update(self._tasks[name], description=described, completed=done, total=total, refresh=True)

    def end(self, name: str) -> None:
        """It serves."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._bars.remove_task(task)
        if not self._tasks:
            self._bars.stop()

    def close(self) -> None:
        """Take away what is left."""
        for name in tuple(self._tasks):
            self.end(name)
