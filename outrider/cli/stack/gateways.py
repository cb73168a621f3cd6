"""HTTP gateway of a stack: its settings, and the reason if there is none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from outrider.addresses import bare_host, check_listening
from outrider.cli.stack.plan import LOOPBACK, ServiceSpec, address_of, spec_of
from outrider.config import CoordinatorSettings, GatewaySettings, Settings
from outrider.config.typed_names import SettingKey
from outrider.errors import ConfigError, install_command
from outrider.process.extras import missing_packages

MODULE = "outrider.gateway"
_SHARED = ("api_token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
"""Security settings that the gateway shares with the coordinator."""


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The gateway's processes."""

    specs: tuple[ServiceSpec, ...] = ()
    settings: GatewaySettings | None = None
    """Resources that the processes share."""
    url: str = ""
    """URL for clients of OpenAI's API; empty without a gateway."""
    note: str = ""
    """Reason why there is no gateway, unless it was turned off."""


def plan_gateway(settings: Settings, *, explicit: Collection[SettingKey]) -> GatewayPlan:
    """The gateway for these settings; ``ConfigError`` if its port was set and it cannot be started."""
    if not settings.gateway.enabled:
        return GatewayPlan()
    gateway = beside(settings.gateway, settings.coordinator, explicit)
    problem = _problem(gateway, settings.coordinator)
    if problem is not None:
        if (gateway.name, "port") in explicit:
            raise problem
        return GatewayPlan(note=f"no HTTP: {problem}")
    is_shared = (gateway.host, gateway.port) == (settings.coordinator.host, settings.coordinator.port)
    if is_shared and (gateway.name, "port") not in explicit:
        message = f"is {gateway.port}, which is HTTP's: --port is gRPC's, and HTTP has --http-port"
        raise ConfigError("coordinator.port", message)
    check_listening(
        gateway.host,
        gateway.port,
        port_setting="gateway.port",
        host_setting=("gateway" if (gateway.name, "host") in explicit else "coordinator") + ".host",
        hint="; --http-port names another, --no-http none",
    )
    scheme = "http" if gateway.tls_cert_file is None else "https"
    return GatewayPlan(_specs(gateway), gateway, f"{scheme}://{address_of(gateway.host, gateway.port)}/v1")


def spread_over(
    plan: GatewayPlan, addresses: Sequence[str], explicit: Collection[SettingKey]
) -> tuple[ServiceSpec, ...]:
    """The processes with a coordinator each to begin with, and the others for when that one does not answer.

    ``addresses`` are those of coordinators that share one; where there are none, or the settings say where coordinators
    are, the processes are as planned.
    """
    settings = plan.settings
    if settings is None or not addresses or (settings.name, "coordinator_address") in explicit:
        return plan.specs
    return _specs(settings, [",".join((*addresses[n:], *addresses[:n])) for n in range(len(addresses))])


def beside(
    gateway: GatewaySettings, coordinator: CoordinatorSettings, explicit: Collection[SettingKey]
) -> GatewaySettings:
    """The gateway's settings with those that follow from the coordinator's."""
    update: dict[str, object] = {"coordinator_address": address_of(coordinator.host, coordinator.port)}
    followed = {name: getattr(coordinator, name) for name in _SHARED}
    followed["host"] = LOOPBACK if coordinator.host.startswith("unix:") else bare_host(coordinator.host)
    followed["log_level"] = coordinator.log_level
    # What goes to an address of this host does not leave it, whatever the address.
    followed["allow_plaintext_token"] = True
    followed["drain_delay_s"] = 0.0
    # Each has one connection, and so one coordinator: as many gateways keep as many coordinators busy.
    followed["num_processes"] = coordinator.num_processes
    update |= {name: value for name, value in followed.items() if (gateway.name, name) not in explicit}
    return gateway.model_copy(update=update)


def _problem(gateway: GatewaySettings, coordinator: CoordinatorSettings) -> ConfigError | None:
    """Reason why a gateway cannot run here; None: it can."""
    if missing := missing_packages("gateway"):
        return ConfigError("gateway", f"needs {', '.join(missing)}: {install_command('gateway')}")
    if coordinator.host.startswith("unix:") or coordinator.tls_cert_file is None:
        return None
    if gateway.coordinator_tls_ca_file is None and not gateway.coordinator_tls:
        return ConfigError("gateway.coordinator_tls_ca_file", "is needed, since coordinator.tls_cert_file is set")
    if coordinator.tls_client_ca_file is not None and gateway.coordinator_tls_cert_file is None:
        return ConfigError(
            "gateway.coordinator_tls_cert_file", "is needed, since coordinator.tls_client_ca_file is set"
        )
    return None


def _specs(gateway: GatewaySettings, coordinators: Sequence[str] = ()) -> tuple[ServiceSpec, ...]:
    """``coordinators``: where these are for the first gateway, the second, and so on; without any, as set."""
    asked = coordinators or [gateway.coordinator_address]
    if gateway.num_processes == 1:
        return (_named(gateway.model_copy(update={"coordinator_address": asked[0]}), "gateway"),)
    sharing = gateway.model_copy(update={"reuse_port": True})
    return tuple(
        _named(
            _numbered(sharing.model_copy(update={"coordinator_address": asked[(number - 1) % len(asked)]}), number),
            f"gateway-{number}",
        )
        for number in range(1, gateway.num_processes + 1)
    )


def _numbered(gateway: GatewaySettings, number: int) -> GatewaySettings:
    """Metrics of each at a port of its own, counting up, and traces in a file of its own."""
    update: dict[str, object] = {}
    if number > 1 and gateway.metrics_port is not None:
        update["metrics_port"] = gateway.metrics_port + number - 1
    if number > 1 and gateway.trace_file is not None:
        path = PurePath(gateway.trace_file)
        update["trace_file"] = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return gateway.model_copy(update=update)


def _named(gateway: GatewaySettings, name: str) -> ServiceSpec:
    place = address_of(gateway.host, gateway.port)
    # Over TLS it is asked for no more than whether it listens: it does when it can serve.
    health_url = f"http://{place}/health" if gateway.tls_cert_file is None else f"tcp://{place}"
    return spec_of(gateway, MODULE, name=name, health_url=health_url)
