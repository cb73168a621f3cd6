"""Processes as Linux tells of them: any may end while it is read, and is then reported as ended."""

from __future__ import annotations

from pathlib import Path


def children(parent: int) -> set[int]:
    """Processes that a process has started and not yet collected, whichever of its threads did so."""
    return {
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and _fields(int(folder.name))[1:2] == [str(parent)]
    }


def arguments(pid: int) -> list[str]:
    """Words of the command line; none once it has ended, its parent's until it has executed its program."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """True if a process runs; one that only waits to be collected does not."""
    return state(pid) not in {"", "Z", "X"}


def state(pid: int) -> str:
    """State of the process, by its letter; empty once it has been collected."""
    return "".join(_fields(pid)[:1])


def processor_ticks(pid: int) -> int:
    """Clock ticks that it has run outside the kernel."""
    return int(_fields(pid)[11])


def _fields(pid: int) -> list[str]:
    """Fields of the process's statistics that follow its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
