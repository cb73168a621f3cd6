"""From settings to processes: which are started, with which flags, at which address.

Pure: picks ports through the function it is given and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from outrider.config import CoordinatorSettings, DraftSettings, Section, Settings, TargetSettings, to_argv
from outrider.config.fields import DraftMethod

LOOPBACK = "127.0.0.1"
_MARGIN_S = 5.0

SectionT = TypeVar("SectionT", bound=Section)

Place = tuple[str, str]
"""(section, key) of a setting."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to run."""

    name: str
    """"target", "draft" or "coordinator"."""
    module: str
    argv: tuple[str, ...]
    address: str
    stop_within_s: float
    """After SIGTERM; past it the process is killed."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes: the models first, the coordinator when they serve."""

    models: tuple[ServiceSpec, ...]
    coordinator: ServiceSpec

    @property
    def address(self) -> str:
        """Where users connect."""
        return self.coordinator.address


def plan_stack(settings: Settings, *, explicit: Collection[Place], free_port: Callable[[], int]) -> StackPlan:
    """The processes for these settings; ``explicit`` are the settings that a user set, which are left as they are."""
    target = _local(settings.target, explicit, free_port)
    models = [_spec(target, "target_service")]
    draft_address = settings.coordinator.draft_address
    if settings.draft.method is not DraftMethod.NONE:
        models.append(_spec(_local(settings.draft, explicit, free_port), "draft_service"))
        draft_address = models[-1].address
    coordinator = _at_once(settings.coordinator, explicit).model_copy(
        update={"target_address": models[0].address, "draft_address": draft_address}
    )
    return StackPlan(models=tuple(models), coordinator=_spec(coordinator, "coordinator"))


def _local(section: SectionT, explicit: Collection[Place], free_port: Callable[[], int]) -> SectionT:
    """The section of a service that only the coordinator beside it talks to: any free port will do."""
    update = {} if (section.name, "port") in explicit else {"port": free_port()}
    return _at_once(section, explicit).model_copy(update=update)


def _at_once(section: SectionT, explicit: Collection[Place]) -> SectionT:
    """Without a drain delay, which is for load balancers and there is none here."""
    return section if (section.name, "drain_delay_s") in explicit else section.model_copy(update={"drain_delay_s": 0.0})


def _spec(section: TargetSettings | DraftSettings | CoordinatorSettings, module: str) -> ServiceSpec:
    return ServiceSpec(
        name=section.name,
        module=module,
        argv=tuple(to_argv(section)),
        address=address_of(section.host, section.port),
        stop_within_s=section.drain_delay_s + section.drain_grace_s + _MARGIN_S,
    )


def address_of(host: str, port: int) -> str:
    """How a process on this host reaches a server that listens there."""
    if host.startswith("unix:"):
        return host
    return f"{LOOPBACK if host in {'0.0.0.0', '[::]', '::'} else host}:{port}"
