"""Further replicas of a model on one host: the settings of the first with devices, ports and files of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from outrider.config import DraftSettings, TargetSettings

ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)


def replicas_of(first: ModelT, devices: tuple[str, ...], free_port: Callable[[], int]) -> dict[str, ModelT]:
    """All replicas by the names of their processes; the first is as it is, the others have one device each.

    Health and metrics of further replicas get free ports, and trace files the replica's number.
    """
    found = {f"{first.name}-1": first}
    for number, device in enumerate(devices, start=2):
        update: dict[str, object] = {"port": free_port()}
        if first.device != "cpu":  # a draft without a model has no GPU
            update["device"] = device
        update |= {key: free_port() for key in ("health_port", "metrics_port") if getattr(first, key) is not None}
        if first.trace_file is not None:
            path = PurePath(first.trace_file)
            update["trace_file"] = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
        found[f"{first.name}-{number}"] = first.model_copy(update=update)
    return found
