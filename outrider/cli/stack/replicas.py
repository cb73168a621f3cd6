"""Replicas of a stack: further processes of a model or of the coordinator, with ports and files of their own.

Coordinators share an address: with ``SO_REUSEPORT`` the kernel gives each new connection to one of the processes that
listen on the port. Each has a port on which gateways reach that one and no other: a gateway has one connection, and by
chance several would use one coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TypeVar

from outrider.addresses import MAX_PORT
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.errors import ConfigError

ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)
_LOOPBACK = "127.0.0.1"
_METRICS_PORTS_BETWEEN = 2
"""Metrics ports of the target and the draft, which follow the first coordinator's."""


def coordinator_processes(
    settings: CoordinatorSettings, free_port: Callable[[], int]
) -> dict[str, CoordinatorSettings]:
    """The settings of each process by its name; ``ConfigError`` for an address that cannot be shared."""
    if settings.num_processes == 1:
        return {settings.name: settings}
    if settings.host.startswith("unix:"):
        raise ConfigError("coordinator.num_processes", f"must be 1 at {settings.host}: a socket file is one process's")
    sharing = settings.model_copy(update={"reuse_port": True})
    numbers = range(1, settings.num_processes + 1)
    return {f"{settings.name}-{number}": _process(sharing, number, free_port) for number in numbers}


def further_metrics_ports(settings: CoordinatorSettings) -> range:
    """The metrics ports of all processes but the first."""
    first = (settings.metrics_port or 0) + _METRICS_PORTS_BETWEEN + 1
    return range(first, first + (settings.num_processes - 1 if settings.metrics_port is not None else 0))


def check_metrics_ports(settings: CoordinatorSettings, others: Mapping[int, str]) -> None:
    """Raise ``ConfigError`` if a metrics port of a further process is none, or one of the ``others``, which are named
    by their settings.
    """
    ports = further_metrics_ports(settings)
    trouble = next((f"{port} is {others[port]}" for port in ports if port in others), "")
    if ports and ports[-1] > MAX_PORT:
        trouble = f"the highest port is {MAX_PORT}"
    if trouble:
        wanted = f"{settings.num_processes} coordinators serve metrics at {settings.metrics_port}"
        raise ConfigError(
            "coordinator.metrics_port", f"{wanted} and {ports[0]} to {ports[-1]}, but {trouble}; name another"
        )


def _process(settings: CoordinatorSettings, number: int, free_port: Callable[[], int]) -> CoordinatorSettings:
    """The health of each is asked at a port of its own: the shared one is answered by any of them."""
    update: dict[str, object] = {}
    if number > 1 or settings.own_port is None:
        update["own_port"] = free_port()
    if number > 1 or settings.health_port is None:
        update |= {"health_port": free_port(), "health_host": _LOOPBACK}
    if number > 1 and settings.metrics_port is not None:
        update["metrics_port"] = further_metrics_ports(settings)[number - 2]
    if number > 1 and settings.trace_file is not None:
        path = PurePath(settings.trace_file)
        update["trace_file"] = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return settings.model_copy(update=update)


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
