"""The gateway of a stack: what it takes over from the coordinator, and when there is none."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.services import _EXTRAS, SERVICES
from outrider.cli.stack import gateways
from outrider.cli.stack.gateways import plan_gateway, spread_over
from outrider.cli.stack.held_ports import hold_port
from outrider.config import GatewaySettings, load, load_all
from outrider.errors import ConfigError
from outrider.process import extras
from outrider.process.extras import EXTRAS


def plan(**places: Any) -> gateways.GatewayPlan:
    flags = {tuple(name.split("__")): value for name, value in places.items()}
    effective = load_all({("target", "model"): "/m", **flags}, environ={})  # type: ignore[dict-item]
    return plan_gateway(effective.settings, explicit=effective.origins)


def settings_of(argv: tuple[str, ...]) -> GatewaySettings:
    return load(GatewaySettings, argv, {})


def test_what_protects_the_coordinator_protects_the_gateway() -> None:
    port = hold_port()
    made = plan(gateway__port=port, coordinator__port=4242, coordinator__api_token_file="/keys")
    (spec,) = made.specs
    settings = settings_of(spec.argv)
    assert made.url == f"http://127.0.0.1:{port}/v1" and spec.health_url == f"http://127.0.0.1:{port}/health"
    assert (settings.coordinator_address, settings.api_token_file) == ("127.0.0.1:4242", "/keys")
    assert settings.drain_delay_s == 0
    own = plan(gateway__port=port, coordinator__api_token_file="/keys", gateway__api_token_file="/other")
    assert settings_of(own.specs[0].argv).api_token_file == "/other"


def test_the_port_of_http_is_not_taken_for_grpc() -> None:
    port = GatewaySettings.model_fields["port"].default
    with pytest.raises(ConfigError, match=rf"coordinator.port: is {port}, which is HTTP's: .* --http-port"):
        plan(coordinator__port=port)


def test_several_processes_share_a_port() -> None:
    made = plan(gateway__port=hold_port(), gateway__num_processes=2)
    assert [spec.name for spec in made.specs] == ["gateway-1", "gateway-2"]
    assert all(settings_of(spec.argv).reuse_port for spec in made.specs)


def test_there_are_as_many_as_coordinators_unless_it_is_said_otherwise() -> None:
    port = hold_port()
    assert len(plan(gateway__port=port, coordinator__num_processes=3).specs) == 3
    assert len(plan(gateway__port=port, coordinator__num_processes=3, gateway__num_processes=1).specs) == 1


@pytest.mark.parametrize(("num_gateways", "expected"), [(1, ["a,b"]), (2, ["a,b", "b,a"]), (3, ["a,b", "b,a", "a,b"])])
def test_each_gateway_begins_with_a_coordinator_of_its_own(num_gateways: int, expected: list[str]) -> None:
    port = hold_port()
    made = plan(gateway__port=port, coordinator__num_processes=2, gateway__num_processes=num_gateways)
    specs = spread_over(made, ["a:1", "b:2"], explicit=())
    found = [settings_of(spec.argv).coordinator_address for spec in specs]
    assert [address.replace(":1", "").replace(":2", "") for address in found] == expected
    assert [spec.name for spec in specs] == [spec.name for spec in made.specs]
    assert spread_over(made, [], explicit=()) == made.specs
    assert spread_over(made, ["a:1", "b:2"], explicit={("gateway", "coordinator_address")}) == made.specs


def test_none_is_started_where_it_is_turned_off() -> None:
    assert plan(gateway__enabled="false") == gateways.GatewayPlan()


def test_a_missing_library_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_missing", lambda module: module == "httptools")
    made = plan()
    assert made.specs == () and 'needs httptools: pip install -e ".[gateway]"' in made.note
    with pytest.raises(ConfigError, match=r"\.\[gateway\]"):
        plan(gateway__port=hold_port())


def test_a_coordinator_with_tls_is_not_undone_by_plain_http(tmp_path: Path) -> None:
    tls = {"coordinator__tls_cert_file": "/c", "coordinator__tls_key_file": "/k"}
    made = plan(**tls)
    assert made.specs == () and "gateway.coordinator_tls_ca_file" in made.note
    port = hold_port()
    (spec,) = plan(**tls, gateway__port=port, gateway__coordinator_tls_ca_file="/ca").specs
    settings = settings_of(spec.argv)
    assert (settings.tls_cert_file, settings.tls_key_file) == ("/c", "/k") and spec.health_url.startswith("tcp://")
    with pytest.raises(ConfigError, match="coordinator_tls_cert_file"):
        plan(**tls, coordinator__tls_client_ca_file="/a", gateway__port=port, gateway__coordinator_tls_ca_file="/ca")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use; --http-port names another"):
            plan(gateway__port=taken.getsockname()[1])


def test_flags_of_serve_are_understood() -> None:
    argv = ["--coordinator=a:1", "--http-host=0.0.0.0", "--http-port", "81"]
    settings = load(GatewaySettings, argv, {})
    assert (settings.host, settings.port) == ("0.0.0.0", 81)


@pytest.mark.parametrize(
    ("words", "addresses"),
    [
        ("--coordinator a:1 b:2 --port 9", "a:1,b:2"),
        ("--port 9 --coordinator=a:1", "a:1"),
        ("--coordinator a:1", "a:1"),
        ("--coordinator-address a:1 b:2", "a:1,b:2"),
        ("--coordinator-address a:1,b:2 --port 9", "a:1,b:2"),
    ],
)
def test_coordinators_are_named_one_after_the_other(words: str, addresses: str) -> None:
    assert load(GatewaySettings, words.split(), {}).coordinator_address == addresses


def test_every_service_of_the_command_line_names_its_extra() -> None:
    assert _EXTRAS.keys() == SERVICES.keys() and set(_EXTRAS.values()) <= EXTRAS.keys()
