"""Choice of the processors of a process, from cores that no other Outrider process of the host has taken.

A core is taken by a socket of its name in Linux's abstract namespace, which disappears with the process. Containers do
not see each other's sockets. The search therefore starts at a random core, and in a pod no processors are taken by
default, unless the pod has exclusive processors.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AUTOMATIC_COUNT = 1
"""The threads of a process follow one another: on one processor they find its caches warm and wake no other."""
_LEAST_FOR_AUTOMATIC = 8
"""Three processes take three."""
_MAY_BE_PAIRS = 15
"""Number of cores besides the first from which on every other one is taken first: two processors of a virtual machine
may be one core without its being told, and load on one then slows the other.
"""
_SYSTEM = Path("/sys")
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"


@dataclass(frozen=True, slots=True)
class ClaimedProcessors:
    """Processors that are taken until ``give_back`` is called."""

    processors: tuple[int, ...]
    claims: tuple[socket.socket, ...]

    def give_back(self) -> None:
        """Release the processors."""
        for claim in self.claims:
            claim.close()


def automatic_count(system: Path = _SYSTEM) -> int:
    """Default number of processors: none on a small host, under a CPU quota, or where other processes may take the same
    ones unseen.
    """
    is_large = sys.platform == "linux" and len(os.sched_getaffinity(0)) >= _LEAST_FOR_AUTOMATIC
    return AUTOMATIC_COUNT if is_large and not has_quota(system) and not _shares_unseen() else 0


def _shares_unseen() -> bool:
    return _POD_VARIABLE in os.environ and len(os.sched_getaffinity(0)) == os.cpu_count()


def has_quota(system: Path = _SYSTEM) -> bool:
    """True if a control group limits the processor time of this process, so that spinning would use it up."""
    return any(_is_quota(path) for path in _quota_files(system / "fs/cgroup"))


def _is_quota(path: Path) -> bool:
    """True if a file says so; one that cannot be read might."""
    try:
        return path.is_file() and not path.read_text(encoding="ascii").startswith(("max", "-1"))
    except OSError:
        return True


def take(
    count: int, *, first: int | None = None, family: str = "outrider", system: Path = _SYSTEM
) -> ClaimedProcessors:
    """Take up to ``count`` processors of free cores, starting at core ``first``, or at a random one if unset.

    The first core of the host comes last: it handles interrupts.
    """
    processors: list[int] = []
    claims: list[socket.socket] = []
    for core in _cores(system, first):
        if len(processors) < count and (claim := _claim(f"{family}-core-{core[0]}")):
            processors.append(core[-1])
            claims.append(claim)
    return ClaimedProcessors(tuple(processors), tuple(claims))


def _cores(system: Path, begin: int | None) -> list[tuple[int, ...]]:
    """The processors that this process may run on, by core."""
    cores: dict[str, list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        siblings = system / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        name = siblings.read_text(encoding="ascii").strip() if siblings.is_file() else str(processor)
        cores.setdefault(name, []).append(processor)
    first, *others = (tuple(core) for core in cores.values())
    if len(others) < _MAY_BE_PAIRS:
        return [*_from(others, begin), first]
    odd = [core for core in others if core[0] % 2 or len(core) > 1]
    return [*_from(odd, begin), *_from([core for core in others if core not in odd], begin), first]


def _from(cores: list[tuple[int, ...]], begin: int | None) -> list[tuple[int, ...]]:
    start = secrets.randbelow(len(cores) + 1) if begin is None else begin
    return [*cores[start:], *cores[:start]]


def _claim(name: str) -> socket.socket | None:
    try:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # where processes may have none
        return None
    try:
        claim.bind(f"\0{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _quota_files(root: Path) -> Iterator[Path]:
    """Quota files of this process's group and those above it, for either version of control groups."""
    yield root / "cpu/cpu.cfs_quota_us"
    own = Path("/proc/self/cgroup")
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    for path in (line.partition("::")[2].lstrip("/") for line in lines if line.startswith("0::")):
        group = root / path
        yield from (folder / "cpu.max" for folder in (group, *group.parents) if folder.is_relative_to(root))
