"""Follower: a process of a service that holds a part of the model and has no clients, before torch is imported.

Owns the question whether this process is one. Refuses to know what a follower does: see ``opening``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outrider.config import DraftSettings, TargetSettings
from outrider.model_executor.distributed.rank_info import find_place

SettingsT = TypeVar("SettingsT", TargetSettings, DraftSettings)


def follow(settings: SettingsT, prepare: Callable[[SettingsT], SettingsT]) -> bool:
    """Whether this process is a follower of rank 0; if so, it has done its work.

    ``prepare`` gives it the settings with a folder in place of a model's name.
    """
    place = find_place(settings.tensor_parallel_size)
    if place.rank == 0:
        return False
    from outrider.model_executor.distributed.runner import follow_model  # imports torch

    follow_model(prepare(settings), place)
    return True
