"""Processes that settings ask for: which are started, with which flags, at which address.

Picks ports through the function it is given and starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outrider.addresses import join_address, reachable_host
from outrider.cli.stack.replicas import check_metrics_ports, coordinator_processes, further_metrics_ports, replicas_of
from outrider.cli.stack.secret import LinkSecret
from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, Settings, TargetSettings, to_argv
from outrider.config.fields import DraftMethod
from outrider.config.typed_names import SettingKey, TypedNames
from outrider.transport.security import OPEN_CLIENT, ClientSecurity, link_security

LOOPBACK = "127.0.0.1"
_MARGIN_S = 5.0
"""Time to exit after the drain grace, in which a process closes its links and files."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

SectionT = TypeVar("SectionT", TargetSettings, DraftSettings, CoordinatorSettings)
ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to run."""

    name: str
    """"target", "draft", "coordinator" or "gateway"."""
    module: str
    argv: tuple[str, ...]
    address: str
    stop_within_s: float
    """Time to end after SIGTERM; past it the process is killed."""
    health_url: str = ""
    """URL of its health, where its address speaks TLS; empty: at its address."""
    inherited: tuple[int, ...] = ()
    """Open files that it gets under the numbers they have here."""
    typed_flags: Mapping[str, str] = field(default_factory=dict)
    """Names that the user typed for the process's own flags."""

    def as_typed(self, message: str) -> str:
        """A message of the process, with what the user typed instead of the process's flags."""
        return _FLAG.sub(lambda flag: self.typed_flags.get(flag[0], flag[0]), message)

    @property
    def section(self) -> str:
        """The section of its settings."""
        return self.name.partition("-")[0]

    @property
    def probe(self) -> str:
        """URL or address of its health."""
        return self.health_url or self.address


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes: the models first, the coordinators when they serve."""

    models: tuple[ServiceSpec, ...]
    coordinators: tuple[ServiceSpec, ...]
    """One, or several on one address; started when the models serve."""
    link: ClientSecurity = OPEN_CLIENT
    """Requirements of the model services on coordinators."""
    note: str = ""
    """Placement of the models, in a line for people; empty where the settings said so."""
    gateways: tuple[ServiceSpec, ...] = ()
    """Started when the coordinator serves."""
    http_url: str = ""
    """URL for clients of OpenAI's API; empty without a gateway."""
    own_addresses: tuple[str, ...] = ()
    """Addresses of the single coordinators, if several share an address."""

    @property
    def address(self) -> str:
        """Address for users."""
        return self.coordinators[0].address


def plan_stack(
    settings: Settings,
    *,
    explicit: Collection[SettingKey],
    free_port: Callable[[], int],
    secret: LinkSecret | None = None,
    replica_devices: tuple[str, ...] = (),
    shares_draft: bool = False,
) -> StackPlan:
    """The processes for these settings; ``explicit`` are the settings that a user set, which are left as they are.

    Each of ``replica_devices`` gets a further replica of target and draft, or of the target alone if all share a draft:
    ``shares_draft``. The models ask for the ``secret``, unless
    tokens are configured or the coordinator has links out of the stack.
    """
    if secret is not None and _is_open(settings):
        secured = _secured(settings, secret)
        made = plan_stack(
            secured,
            explicit=explicit,
            free_port=free_port,
            replica_devices=replica_devices,
            shares_draft=shares_draft,
        )
        return _inheriting(secret, made)
    settings = _sized_for(settings, explicit)
    settings = _with_room_for_sessions(settings, explicit, len(replica_devices) + 1 if shares_draft else 1)
    check_metrics_ports(settings.coordinator, _settings_by_port(settings))
    free_port = _avoiding(_named_ports(settings), free_port)
    settings = _with_target_model(settings)
    targets = _with_replicas(settings.target, replica_devices, explicit, free_port)
    drafts = {}
    if settings.draft.method is not DraftMethod.NONE:
        drafts = _with_replicas(settings.draft, () if shares_draft else replica_devices, explicit, free_port)
    coordinator = _probed(_at_once(settings.coordinator, explicit), free_port).model_copy(
        update={
            "target_address": _addresses(targets),
            "draft_address": _addresses(drafts) if drafts else settings.coordinator.draft_address,
        }
    )
    models = [_spec(each, "outrider_target", name=name) for name, each in targets.items()]
    models += [_spec(each, "outrider_draft", name=name) for name, each in drafts.items()]
    processes = coordinator_processes(coordinator, free_port)
    coordinators = tuple(_spec(each, "outrider_coordinator", name=name) for name, each in processes.items())
    shared = processes.values() if len(processes) > 1 else ()
    own = tuple(address_of(each.host, each.own_port) for each in shared if each.own_port is not None)
    return StackPlan(tuple(models), coordinators, link_security(coordinator), own_addresses=own)


def _with_replicas(
    section: ModelT, devices: tuple[str, ...], explicit: Collection[SettingKey], free_port: Callable[[], int]
) -> dict[str, ModelT]:
    """The replicas of one model by the names of their processes; the first has the section's own device and ports."""
    first = _local(section, explicit, free_port)
    return {section.name: first} if not devices else replicas_of(first, devices, free_port)


def _addresses(replicas: Mapping[str, TargetSettings | DraftSettings]) -> str:
    return ",".join(address_of(each.host, each.port) for each in replicas.values())


def _with_target_model(settings: Settings) -> Settings:
    """A draft that reads the target's folder is told which that is; an MTP layer is always that target's."""
    draft = settings.draft
    if not draft.method.reads_target or (draft.target_model is not None and draft.method.needs_model):
        return settings
    return replace(settings, draft=draft.model_copy(update={"target_model": settings.target.model}))


def _with_room_for_sessions(settings: Settings, explicit: Collection[SettingKey], num_targets: int) -> Settings:
    """Settings with room for the coordinator's running requests in both models, in the draft those of all its targets;
    as many more may be about to end.
    """
    needed = 2 * settings.coordinator.max_running_requests
    return replace(
        settings,
        target=_with_room(settings.target, needed, explicit),
        draft=_with_room(settings.draft, needed * num_targets, explicit),
    )


def _with_room(section: ModelT, needed: int, explicit: Collection[SettingKey]) -> ModelT:
    if (section.name, "max_sessions_per_link") in explicit or section.max_sessions_per_link >= needed:
        return section
    return section.model_copy(update={"max_sessions_per_link": needed})


def _is_open(settings: Settings) -> bool:
    """True if the links are the stack's alone and no tokens are configured for them."""
    configured = (section.link_token_file for section in (settings.target, settings.draft, settings.coordinator))
    has_own_draft = settings.draft.method is not DraftMethod.NONE or settings.coordinator.draft_address is None
    return has_own_draft and not any(configured)


def _secured(settings: Settings, secret: LinkSecret) -> Settings:
    token = {"link_token_file": secret.path}
    # What goes to an address of this host does not leave it, whatever the address.
    sent = {**token, "allow_plaintext_link_token": True}
    return replace(
        settings,
        target=settings.target.model_copy(update=token),
        draft=settings.draft.model_copy(update=token),
        coordinator=settings.coordinator.model_copy(update=sent),
    )


def _inheriting(secret: LinkSecret, plan: StackPlan) -> StackPlan:
    def held(specs: tuple[ServiceSpec, ...]) -> tuple[ServiceSpec, ...]:
        return tuple(replace(spec, inherited=secret.descriptors) for spec in specs)

    return replace(plan, models=held(plan.models), coordinators=held(plan.coordinators))


def _sized_for(settings: Settings, explicit: Collection[SettingKey]) -> Settings:
    """KV cache and CUDA graphs for what this coordinator will ask for."""
    coordinator = settings.coordinator
    wanted = {
        "max_running_requests": coordinator.max_running_requests,
        "num_speculative_tokens": coordinator.num_speculative_tokens,
    }

    def follow(section: SectionT) -> SectionT:
        update = {key: value for key, value in wanted.items() if (section.name, key) not in explicit}
        return section.model_copy(update=update)

    return replace(settings, target=follow(settings.target), draft=follow(settings.draft))


def _avoiding(ports: Collection[int], free_port: Callable[[], int]) -> Callable[[], int]:
    """``free_port`` without these, and none twice, whether or not it holds what it gives."""
    given = set(ports)

    def choose() -> int:
        port = next(port for port in iter(free_port, None) if port not in given)
        given.add(port)
        return port

    return choose


def _named_ports(settings: Settings) -> set[int]:
    return {*_settings_by_port(settings), *further_metrics_ports(settings.coordinator)}


def _settings_by_port(settings: Settings) -> dict[int, str]:
    """Each port that the settings name, with the setting."""
    found = {settings.gateway.port: "gateway.port"} if settings.gateway.enabled else {}
    for section in (settings.target, settings.draft, settings.coordinator):
        for key in ("port", "own_port", "health_port", "metrics_port"):
            port = getattr(section, key, None)
            if port is not None:
                found[port] = f"{section.name}.{key}"
    if settings.gateway.enabled and settings.gateway.metrics_port is not None:
        for number in range(settings.gateway.num_processes):
            found[settings.gateway.metrics_port + number] = "gateway.metrics_port, counting up"
    return found


def _local(section: SectionT, explicit: Collection[SettingKey], free_port: Callable[[], int]) -> SectionT:
    """The section of a service that only the coordinator beside it talks to: any free port will do."""
    update = {} if (section.name, "port") in explicit else {"port": free_port()}
    return _probed(_at_once(section, explicit).model_copy(update=update), free_port)


def _probed(section: SectionT, free_port: Callable[[], int]) -> SectionT:
    """Service with a health probe; with TLS by HTTP on this host, as the supervisor has no client certificate."""
    if section.tls_cert_file is None or section.health_port is not None:
        return section
    return section.model_copy(update={"health_port": free_port(), "health_host": LOOPBACK})


def _at_once(section: SectionT, explicit: Collection[SettingKey]) -> SectionT:
    """Service without a drain delay, which is for load balancers: there is none here."""
    return section if (section.name, "drain_delay_s") in explicit else section.model_copy(update={"drain_delay_s": 0.0})


def _spec(section: TargetSettings | DraftSettings | CoordinatorSettings, module: str, *, name: str = "") -> ServiceSpec:
    return spec_of(section, module, name=name or section.name, health_url=_health_url(section))


def spec_of(
    section: TargetSettings | DraftSettings | CoordinatorSettings | GatewaySettings,
    module: str,
    *,
    name: str,
    health_url: str,
) -> ServiceSpec:
    """The process that serves with a section's settings."""
    return ServiceSpec(
        name=name,
        module=module,
        argv=tuple(to_argv(section)),
        address=address_of(section.host, section.port),
        stop_within_s=section.drain_delay_s + section.drain_grace_s + _MARGIN_S,
        health_url=health_url,
    )


def _health_url(section: TargetSettings | DraftSettings | CoordinatorSettings) -> str:
    shares_port = isinstance(section, CoordinatorSettings) and section.reuse_port
    if section.health_port is None or not (section.tls_cert_file or shares_port):
        return ""
    return f"http://{address_of(section.health_host or section.host, section.health_port)}/readyz"


def with_typed_names(plan: StackPlan, names: TypedNames) -> StackPlan:
    """The plan with the names for errors of its processes."""

    def named(specs: tuple[ServiceSpec, ...]) -> tuple[ServiceSpec, ...]:
        return tuple(replace(spec, typed_flags=names.flags_of(spec.section)) for spec in specs)

    return replace(
        plan, models=named(plan.models), coordinators=named(plan.coordinators), gateways=named(plan.gateways)
    )


def inheriting(plan: StackPlan, descriptors: tuple[int, ...]) -> StackPlan:
    """The plan with open files that those who face users inherit too."""

    def holding(specs: tuple[ServiceSpec, ...]) -> tuple[ServiceSpec, ...]:
        return tuple(replace(spec, inherited=spec.inherited + descriptors) for spec in specs)

    return replace(plan, coordinators=holding(plan.coordinators), gateways=holding(plan.gateways))


def address_of(host: str, port: int) -> str:
    """Address at which a process on this host reaches a server that listens there."""
    return join_address(reachable_host(host), port)
