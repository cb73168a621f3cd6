"""Placement of the models: the GPU of each if the settings leave it open, and its share of the memory.

``auto`` is a GPU if there is one: the target uses the first ones, the draft other ones if enough are left, otherwise
the same. Without a GPU it is the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from outrider.cli.facts import device_text
from outrider.cli.stack.gpus import Gpus
from outrider.config import DraftSettings, Settings, TargetSettings
from outrider.errors import ConfigError

_MEMORY_RATIO = 0.9
"""Share of the memory of a GPU that both models are on; the rest is for other memory of the processes."""
_TARGET_RATIO = 7 / 9
"""Target's part of the memory of a GPU that both models are on: 0.7 of the 0.9."""
_CACHE_SIZES = ("num_pages", "kv_cache_bytes", "gpu_memory_utilization")

ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)


@dataclass(frozen=True, slots=True)
class Placed:
    """Settings with resolved devices."""

    settings: Settings
    note: str = ""
    """Placement of the models, in a line for people; empty where the settings said so themselves."""


def place(settings: Settings, gpus: Gpus, *, gpu_memory_utilization: float | None = None) -> Placed:
    """Resolve the devices of both models; ``ConfigError`` if more GPUs are requested than exist.

    ``gpu_memory_utilization`` is the fraction of each GPU's memory for all models on it: models on one GPU divide it.
    """
    target = _choose(settings.target, gpus, settings.draft if _has_draft(settings) else None)
    draft = _choose(settings.draft, gpus, target) if _has_draft(settings) else _on(settings.draft, "cpu")
    placed = replace(settings, target=target, draft=draft)
    was_open = "auto" in {settings.target.device, settings.draft.device if _has_draft(settings) else ""}
    note = _note(placed, gpus) + _hint(settings, gpus) if was_open else ""
    return Placed(_with_shares(placed, gpu_memory_utilization), note)


def share_a_gpu(settings: Settings) -> bool:
    """True if both models measure the free memory of the same GPU independently."""
    return _has_draft(settings) and bool(_indexes(settings.target) & _indexes(settings.draft))


def shares_of_one_gpu(utilization: float | None = None) -> tuple[float, float]:
    """Fractions of a GPU's memory for a target and a draft that share it."""
    share = _MEMORY_RATIO if utilization is None else utilization
    return share * _TARGET_RATIO, share * (1 - _TARGET_RATIO)


def has_cache_size(section: TargetSettings | DraftSettings) -> bool:
    """True if the section sizes its KV cache itself, and gets no share of the memory."""
    return any(getattr(section, name) is not None for name in _CACHE_SIZES)


def _has_draft(settings: Settings) -> bool:
    return settings.draft.method.has_model


def _choose(section: ModelT, gpus: Gpus, other: TargetSettings | DraftSettings | None) -> ModelT:
    """The section on the first GPUs without the other model, else on the first; on the CPU where there is none."""
    if section.device != "auto":
        _require(section, gpus)
        return section
    if not gpus.names:
        _check_fits_cpu(section, gpus)
        return _on(section, "cpu")
    taken = _indexes(other) if other is not None else set()
    places = [_on(section, f"cuda:{first}") for first in range(len(gpus.names) - section.tensor_parallel_size + 1)]
    chosen = next((one for one in places if not taken & _indexes(one)), _on(section, "cuda:0"))
    _require(chosen, gpus)
    return chosen


def _on(section: ModelT, device: str) -> ModelT:
    return section.model_copy(update={"device": device})


def _indexes(section: TargetSettings | DraftSettings) -> set[int]:
    """Indexes of a section's GPUs; empty on a CPU or while the device is undecided."""
    kind, _, first = section.device.partition(":")
    start = int(first or 0)
    return set(range(start, start + section.tensor_parallel_size)) if kind == "cuda" else set()


def _require(section: TargetSettings | DraftSettings, gpus: Gpus) -> None:
    needed = _indexes(section)
    if not needed or max(needed) < len(gpus.names):
        return
    there = f"{len(gpus.names)} ({', '.join(gpus.names)})" if gpus.names else "no GPU here that torch can use"
    if section.tensor_parallel_size > 1:
        where = device_text(section.device, section.tensor_parallel_size)
        problem = f"is {section.tensor_parallel_size}, which needs {where}; there is {there}"
        raise ConfigError(f"{section.name}.tensor_parallel_size", problem)
    raise ConfigError(f"{section.name}.device", f"{section.device} is set, but there is {there}")


def _check_fits_cpu(section: TargetSettings | DraftSettings, gpus: Gpus) -> None:
    why = gpus.problem or "no GPU was found"
    if section.gpu_memory_utilization is not None:
        raise ConfigError(f"{section.name}.gpu_memory_utilization", f"is set, and {why}: give kv_cache_bytes on a CPU")
    if section.tensor_parallel_size > 1:
        problem = f"is {section.tensor_parallel_size}, and {why}; --device cpu runs so many processes on the CPU"
        raise ConfigError(f"{section.name}.tensor_parallel_size", problem)


def _with_shares(settings: Settings, utilization: float | None) -> Settings:
    if share_a_gpu(settings):
        target, draft = shares_of_one_gpu(utilization)
    elif utilization is None:
        return settings
    elif not _indexes(settings.target) and not (_has_draft(settings) and _indexes(settings.draft)):
        raise ConfigError("gpu_memory_utilization", "is set, and no model is on a GPU: give kv_cache_bytes on a CPU")
    else:
        target = draft = utilization
    return replace(settings, target=_with_share(settings.target, target), draft=_with_share(settings.draft, draft))


def _with_share(section: ModelT, share: float) -> ModelT:
    """Service with a share of GPU memory, unless its cache has a size or it has no GPU."""
    if not _indexes(section) or has_cache_size(section):
        return section
    return section.model_copy(update={"gpu_memory_utilization": round(share, 4)})


def _note(settings: Settings, gpus: Gpus) -> str:
    target, draft = settings.target, settings.draft
    if not gpus.names:
        return f"{gpus.problem or 'no GPU was found'}: the models run on the CPU"
    on_target = _where(target, gpus)
    if not _has_draft(settings):
        return f"the target runs on {on_target}"
    if share_a_gpu(settings):
        return f"target and draft share {on_target}"
    return f"the target runs on {on_target}, the draft on {_where(draft, gpus)}"


def _hint(settings: Settings, gpus: Gpus) -> str:
    """Hint on several GPUs of which nothing is set: a GPU for the draft alone rarely pays in speed."""
    is_set = any(each.device != "auto" or each.tensor_parallel_size > 1 for each in (settings.target, settings.draft))
    if is_set or not _has_draft(settings) or len(gpus) < 2:
        return ""
    return "; outrider serve --optimize latency or throughput chooses the arrangement for a load"


def _where(section: TargetSettings | DraftSettings, gpus: Gpus) -> str:
    first = min(_indexes(section), default=0)
    name = gpus.names[first] if _indexes(section) else ""
    return device_text(section.device, section.tensor_parallel_size, name)
