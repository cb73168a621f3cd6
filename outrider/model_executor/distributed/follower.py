"""A service's process that shares rank 0's model and serves nobody, before torch is imported.

Owns the question whether this process is one. Refuses to know what a follower does: see ``opening``.
"""

from __future__ import annotations

from outrider.config import DraftSettings, TargetSettings
from outrider.model_executor.distributed.rank_info import find_place


def follow(settings: TargetSettings | DraftSettings) -> bool:
    """Whether this process is one that shares rank 0's model and serves nobody; if so, it has done its work."""
    place = find_place(settings.tensor_parallel_size)
    if place.rank == 0:
        return False
    from outrider.model_executor.distributed.runner import follow_model  # imports torch

    follow_model(settings, place)
    return True
