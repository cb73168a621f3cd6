"""Rank of a process among those that share a model; imports no torch.

Owns the variables that say so: torchrun's, which rank 0 of a service started alone also gives to the ranks that it
starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from outrider.config import DraftSettings, TargetSettings
from outrider.errors import ConfigError
from outrider.model_executor.distributed.sharding import SETTING

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LIFELINE = "TENSOR_PARALLEL_LIFELINE"
"""Set where standard input ends with the process that started this one."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process among ``size``."""

    rank: int
    size: int
    local_rank: int = 0
    """Rank among those of its host: which of the host's devices is its own."""
    is_started: bool = True
    """True if the others are started already; else rank 0 starts them, all on its host."""
    has_lifeline: bool = False


def find_rank(size: int, environ: Mapping[str, str] | None = None) -> RankInfo:
    """The place of this process among ``size`` ranks; rank 0, with the others still to be started, if nothing else is
    said. ``ConfigError`` when torchrun started another number of ranks.
    """
    environ = os.environ if environ is None else environ
    if size == 1 or any(name not in environ for name in _TORCHRUN):
        return RankInfo(0, size, is_started=False)
    rank, started, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if started != size:
        raise ConfigError(SETTING, f"is {size} and {started} processes were started (WORLD_SIZE): give both alike")
    return RankInfo(rank, size, local_rank, has_lifeline=_LIFELINE in environ)


def environment_of(place: RankInfo, port: int) -> dict[str, str]:
    """Environment variables that give a rank on this host its place; the store listens at ``port``."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "TORCHELASTIC_"))
    }
    return {
        **inherited,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _LIFELINE: "1",
        "PYTHONUNBUFFERED": "1",
    }


def hold_lifeline(on_end: Callable[[], object]) -> None:
    """Call ``on_end``, from a thread, when the process at the other end of standard input is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


SettingsT = TypeVar("SettingsT", TargetSettings, DraftSettings)


def follow(settings: SettingsT, prepare: Callable[[SettingsT], SettingsT]) -> bool:
    """Run the follower of rank 0, if this process is one, to its end; True if it was one.

    ``prepare`` gives it the settings with a folder in place of a model's name.
    """
    place = find_rank(settings.tensor_parallel_size)
    if place.rank == 0:
        return False
    from outrider.model_executor.distributed.runner import follow_model  # imports torch

    follow_model(prepare(settings), place)
    return True
