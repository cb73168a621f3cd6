"""Progress bars on a terminal while services start.

Draws the bars. The caller reads the progress from the services' logs.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartBars:
    """One bar per service, from its start until it serves; all disappear when all serve."""

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
        """Show the progress and its message."""
        if name in self._tasks:
            described = f"{name}: {message}"
            self._bars.update(self._tasks[name], description=described, completed=done, total=total, refresh=True)

    def end(self, name: str) -> None:
        """The service is ready."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._bars.remove_task(task)
        if not self._tasks:
            self._bars.stop()

    def close(self) -> None:
        """Remove the remaining bars."""
        for name in tuple(self._tasks):
            self.end(name)
