"""GPUs of a measured system, from the placement that it reports of its models.

Both models are taken to be on one host, and to have one replica each: more GPUs than that have to be counted by the
caller.
"""

from __future__ import annotations

from outrider.generation import ModelInfo, ModelPlacement


def num_gpus(info: ModelInfo) -> int:
    """Number of GPUs of both models; 0 on CPUs."""
    return len(_gpus(info.target_placement) | _gpus(info.draft_placement))


def describe_placement(info: ModelInfo, gpus: int | None = None) -> str:
    """Arrangement of the models in a few words; empty on CPUs.

    ``gpus``: of all replicas, where there are further ones.
    """
    described, each = _describe_replica(info), num_gpus(info)
    return f"{gpus // each} replicas, each {described}" if each and gpus and gpus > each else described


def _describe_replica(info: ModelInfo) -> str:
    target, draft = _gpus(info.target_placement), _gpus(info.draft_placement)
    if not target:
        return ""
    on_target = f"target on {len(target)} GPU{'s' if len(target) > 1 else ''}"
    if not draft:
        return on_target
    if target == draft:
        return "target and draft on one GPU" if len(target) == 1 else f"target and draft on {len(target)} GPUs"
    return f"{on_target}, draft on {'one of them' if draft < target else f'{len(draft)} more'}"


def _gpus(placement: ModelPlacement) -> set[int]:
    kind, _, first = placement.device.partition(":")
    start = int(first or 0)
    return set(range(start, start + placement.tensor_parallel_size)) if kind == "cuda" else set()
