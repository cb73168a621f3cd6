"""Who gets how many tokens of the next forward.

Owns the token budget: running rows first, then chunks of prefills, all prefills in turn. Plain Python; refuses to know
sessions, sequences and devices.

A forward's time grows with its tokens, so a budget bounds how long a running session waits for a neighbour's prefill:
beside running rows a smaller one than alone, also while these are away for a moment. An eighth of the whole is kept for
prefills whenever there are any, so that running rows cannot starve them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

DEFAULT_PREFILL_BESIDE = 256
"""On a GPU so many tokens more cost little: their weights are being read anyway."""
_FEW_TOKENS = 8
"""A job with fewer tokens than this besides its last ones is running rather than prefilling."""
_MIN_CHUNK = 16
"""Prefills are not cut smaller than this to serve more of them in one forward."""
_PREFILL_SHARE = 8


class Job(Protocol):
    """Tokens waiting to be appended to one sequence."""

    @property
    def num_left(self) -> int:
        """How many, at least one."""
        ...

    @property
    def num_last(self) -> int:
        """How many at the end must go through one forward together, from 1 to ``num_left``."""
        ...


def share_tokens(
    jobs: Sequence[Job], max_tokens: int, *, max_beside: int = DEFAULT_PREFILL_BESIDE, is_beside: bool = False
) -> list[int]:
    """How many tokens of each job go into the next forward; at least one job is served.

    ``jobs`` stand in the order in which they were last served, longest ago first; whoever gets nothing now stands
    nearer to the front next time. A single job may pass the budget with its last tokens, which cannot be cut.
    ``max_beside`` is the most that prefills get of a forward in which running rows are served too, or for which such
    rows will have to wait: ``is_beside``.
    """
    shares = [0] * len(jobs)
    running = [index for index, job in enumerate(jobs) if is_running(job)]
    prefills = [index for index, job in enumerate(jobs) if not is_running(job)]
    kept = max(1, max_tokens // _PREFILL_SHARE) if prefills else 0
    left = max_tokens - kept
    for index in running:
        wanted = jobs[index].num_left
        if wanted <= left or not any(shares):
            shares[index] = wanted
            left -= wanted
    room = max(left + kept, int(bool(prefills)))  # one token even beside a row that passed the budget alone
    _share_among_prefills(jobs, prefills, min(room, max_beside) if is_beside or any(shares) else room, shares)
    return shares


def is_running(job: Job) -> bool:
    """Whether it belongs to a session that runs, rather than to one whose prompt is being taken in."""
    return job.num_left - job.num_last < _FEW_TOKENS


def _share_among_prefills(jobs: Sequence[Job], prefills: Sequence[int], left: int, shares: list[int]) -> None:
    """Equal shares; what a short prefill leaves goes to the longer ones."""
    if left < 1:
        return
    served = sorted(prefills[: max(1, left // _MIN_CHUNK)], key=lambda index: jobs[index].num_left)
    for rank, index in enumerate(served):
        shares[index] = _chunk(jobs[index], left // (len(served) - rank))
        left -= shares[index]


def _chunk(job: Job, share: int) -> int:
    return job.num_left if share >= job.num_left else min(share, job.num_left - job.num_last)
