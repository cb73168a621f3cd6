"""Processes that settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.stack.plan import StackPlan, address_of, plan_stack
from outrider.cli.stack.process import last_error
from outrider.cli.stack.running import shown
from outrider.cli.stack.secret import LinkSecret, make_link_secret
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings, load, load_all
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError
from outrider.transport.security import OPEN_CLIENT


def plan(flags: Mapping[tuple[str, str], Any], secret: LinkSecret | None = None) -> StackPlan:
    effective = load_all({("target", "model"): "/t", **flags}, environ={})
    ports = iter(range(9001, 9010))
    return plan_stack(effective.settings, explicit=effective.origins, free_port=lambda: next(ports), secret=secret)


def test_the_coordinator_is_told_where_the_models_are() -> None:
    made = plan({("draft", "model"): "/d", ("coordinator", "port"): 7000})
    target, draft = made.models
    assert (target.module, draft.module) == ("outrider_target", "outrider_draft")
    assert (target.address, draft.address) == ("127.0.0.1:9001", "127.0.0.1:9002")
    coordinator = load(CoordinatorSettings, made.coordinators[0].argv, {})
    assert coordinator.target_address == target.address
    assert coordinator.draft_address == draft.address
    assert made.address == "127.0.0.1:7000"


def test_no_port_is_given_twice() -> None:
    effective = load_all(
        {("target", "model"): "/t", ("draft", "model"): "/d", ("draft", "health_port"): 9001}, environ={}
    )
    ports = iter([9001, 50050, 9002, 9002, 9003])
    made = plan_stack(effective.settings, explicit=effective.origins, free_port=lambda: next(ports))
    assert [spec.address for spec in made.models] == ["127.0.0.1:9002", "127.0.0.1:9003"]


def test_the_flags_of_each_process_are_its_settings() -> None:
    made = plan({("draft", "model"): "/d", ("target", "page_size"): 64, ("draft", "dtype"): "bfloat16"})
    target = load(TargetSettings, made.models[0].argv, {})
    draft = load(DraftSettings, made.models[1].argv, {})
    assert (target.model, target.page_size, target.port) == ("/t", 64, 9001)
    assert (draft.model, draft.dtype, draft.method) == ("/d", "bfloat16", DraftMethod.DRAFT_MODEL)


def test_the_models_ask_for_the_secret_and_the_coordinator_brings_it() -> None:
    secret = make_link_secret()
    token = Path(secret.path).read_text().strip()
    made = plan({("draft", "model"): "/d"}, secret)
    files = [
        load(TargetSettings, made.models[0].argv, {}).link_token_file,
        load(DraftSettings, made.models[1].argv, {}).link_token_file,
        load(CoordinatorSettings, made.coordinators[0].argv, {}).link_token_file,
    ]
    assert files == [secret.path] * 3
    assert all(spec.inherited == secret.descriptors for spec in (*made.models, *made.coordinators))
    assert not any(token in word for spec in (*made.models, *made.coordinators) for word in spec.argv)
    assert made.link.token is not None and made.link.token() == token
    assert Path(make_link_secret().path).read_text().strip() != token
    assert Path(secret.path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "flags",
    [
        {("target", "link_token_file"): "/tokens"},
        {("coordinator", "draft_address"): "elsewhere:50052"},
    ],
    ids=["tokens are configured", "a draft of another host"],
)
def test_no_secret_where_links_are_not_the_stacks_alone(
    flags: Mapping[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.stack.plan.link_security", lambda _: OPEN_CLIENT)  # reads no file
    made = plan(flags, LinkSecret("/secret", (9,)))
    assert load(CoordinatorSettings, made.coordinators[0].argv, {}).link_token_file is None
    assert made.models[0].inherited == ()
    given = load(TargetSettings, made.models[0].argv, {}).link_token_file
    assert given == flags.get(("target", "link_token_file"))


def test_the_models_have_room_for_the_requests_of_the_coordinator() -> None:
    made = plan({("coordinator", "max_running_requests"): 3000, ("draft", "model"): "/d"})
    assert load(TargetSettings, made.models[0].argv, {}).max_sessions_per_link == 6000
    assert load(DraftSettings, made.models[1].argv, {}).max_sessions_per_link == 6000
    made = plan({("coordinator", "max_running_requests"): 3000, ("target", "max_sessions_per_link"): 5})
    assert load(TargetSettings, made.models[0].argv, {}).max_sessions_per_link == 5


def test_without_a_draft_there_is_no_draft_process() -> None:
    made = plan({})
    assert [spec.name for spec in made.models] == ["target"]
    assert load(CoordinatorSettings, made.coordinators[0].argv, {}).draft_address is None


def test_ngram_is_a_draft_process_without_a_model() -> None:
    made = plan({("draft", "method"): "ngram"})
    draft = load(DraftSettings, made.models[1].argv, {})
    assert (draft.method, draft.model) == (DraftMethod.NGRAM, None)


def test_a_draft_that_runs_elsewhere_is_left_where_it_is() -> None:
    made = plan({("coordinator", "draft_address"): "other:50052"})
    assert load(CoordinatorSettings, made.coordinators[0].argv, {}).draft_address == "other:50052"


def test_there_is_no_drain_delay_unless_it_is_asked_for() -> None:
    assert load(CoordinatorSettings, plan({}).coordinators[0].argv, {}).drain_delay_s == 0
    asked = plan({("coordinator", "drain_delay_s"): 3})
    assert load(CoordinatorSettings, asked.coordinators[0].argv, {}).drain_delay_s == 3
    assert asked.coordinators[0].stop_within_s > 3 + 30


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:1"), ("0.0.0.0", "127.0.0.1:1"), ("name", "name:1"), ("unix:/run/x", "unix:/run/x")],
)
def test_an_address_that_listens_everywhere_is_reached_here(host: str, address: str) -> None:
    assert address_of(host, 1) == address


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["noise", "error: no weights", "more noise"], "no weights"),
        (['{"level": "info", "message": "x"}', '{"level": "error", "message": "device lost"}'], "device lost"),
        (
            ["Traceback (most recent call last):", "ValueError: bad", '{"level": "info", "message": "x"}'],
            "ValueError: bad",
        ),
        ([], ""),
    ],
)
def test_the_reason_of_an_end_is_found_in_what_was_written(lines: list[str], reason: str) -> None:
    assert last_error(lines) == reason


@pytest.mark.parametrize(
    ("line", "quiet", "verbose"),
    [
        ('{"level": "info", "logger": "outrider.telemetry.progress", "message": "loading"}', "loading", "loading"),
        ('{"level": "warning", "logger": "x", "message": "no room"}', "no room", "no room"),
        ('{"level": "info", "logger": "x", "message": "attached"}', "", "attached"),
        ('{"level": "warning", "message": "failed", "request_id": "r"}', "failed request_id=r", "failed request_id=r"),
        ("{not json", "", ""),
        ("plain", "", ""),
    ],
)
def test_of_a_services_log_people_see_what_matters(line: str, quiet: str, verbose: str) -> None:
    assert shown(line, everything=False) == quiet
    assert shown(line, everything=True) == verbose


def test_behind_tls_a_service_is_asked_over_http_whether_it_serves() -> None:
    files = {"tls_cert_file": "/c", "tls_key_file": "/k"}
    made = plan({("target", key): path for key, path in files.items()})
    target = load(TargetSettings, made.models[0].argv, {})
    assert (target.health_host, target.health_port) == ("127.0.0.1", 9002)
    assert made.models[0].probe == "http://127.0.0.1:9002/readyz"
    assert made.coordinators[0].probe == made.coordinators[0].address


def test_graphs_are_captured_for_what_the_coordinator_asks_for() -> None:
    made = plan(
        {
            ("draft", "model"): "/d",
            ("coordinator", "max_running_requests"): 96,
            ("coordinator", "num_speculative_tokens"): 6,
            ("draft", "max_running_requests"): 12,
        }
    )
    target, draft = load(TargetSettings, made.models[0].argv, {}), load(DraftSettings, made.models[1].argv, {})
    assert (target.max_running_requests, target.num_speculative_tokens) == (96, 6)
    assert (draft.max_running_requests, draft.num_speculative_tokens) == (12, 6)


def test_several_coordinators_share_an_address_and_nothing_else() -> None:
    secret = make_link_secret()
    made = plan(
        {
            ("draft", "model"): "/d",
            ("coordinator", "num_processes"): 3,
            ("coordinator", "metrics_port"): 9100,
            ("coordinator", "trace_file"): "/tmp/trace.json",
        },
        secret,
    )
    assert [spec.name for spec in made.coordinators] == ["coordinator-1", "coordinator-2", "coordinator-3"]
    assert {spec.address for spec in made.coordinators} == {made.address}
    settings = [load(CoordinatorSettings, spec.argv, {}) for spec in made.coordinators]
    assert all(each.reuse_port for each in settings)
    assert len({each.health_port for each in settings} | {each.own_port for each in settings}) == 6
    assert made.own_addresses == tuple(f"127.0.0.1:{each.own_port}" for each in settings)
    assert [spec.probe for spec in made.coordinators] == [
        f"http://127.0.0.1:{each.health_port}/readyz" for each in settings
    ]
    assert [each.metrics_port for each in settings] == [9100, 9103, 9104]  # 9101 and 9102: target and draft
    assert [each.trace_file for each in settings] == ["/tmp/trace.json", "/tmp/trace-2.json", "/tmp/trace-3.json"]
    assert {each.target_address for each in settings} == {made.models[0].address}
    assert all(spec.inherited == secret.descriptors for spec in made.coordinators)


def test_one_coordinator_does_not_share_its_port() -> None:
    (spec,) = plan({}).coordinators
    assert spec.name == "coordinator"
    settings = load(CoordinatorSettings, spec.argv, {})
    assert not settings.reuse_port and settings.own_port is None
    assert not plan({}).own_addresses


def test_a_socket_file_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"coordinator\.num_processes"):
        plan({("coordinator", "host"): "unix:/tmp/s", ("coordinator", "num_processes"): 2})


@pytest.mark.parametrize(
    ("taken", "setting"),
    [
        ({("gateway", "port"): 9104}, r"9104 is gateway\.port"),
        ({("target", "health_port"): 9103}, r"9103 is target\.health_port"),
        ({("gateway", "metrics_port"): 9102, ("gateway", "num_processes"): 2}, r"9103 is gateway\.metrics_port"),
    ],
)
def test_metrics_ports_of_further_coordinators_are_compared_with_all_others(taken: Any, setting: str) -> None:
    flags = {("coordinator", "num_processes"): 3, ("coordinator", "metrics_port"): 9100}
    plan(flags)
    with pytest.raises(ConfigError, match=setting):
        plan({**flags, **taken})


def test_ports_of_a_gateway_that_is_switched_off_are_free() -> None:
    flags = {("coordinator", "num_processes"): 2, ("coordinator", "metrics_port"): 7997}
    with pytest.raises(ConfigError, match=r"8000 is gateway\.port"):
        plan(flags)
    plan({**flags, ("gateway", "enabled"): False})
    plan({**flags, ("gateway", "enabled"): False, ("gateway", "metrics_port"): 8000})


def test_metrics_ports_end_at_the_highest_port() -> None:
    with pytest.raises(ConfigError, match="65535"):
        plan({("coordinator", "num_processes"): 3, ("coordinator", "metrics_port"): 65_533})


def test_no_service_is_given_a_metrics_port_of_a_further_coordinator() -> None:
    made = plan({("coordinator", "num_processes"): 3, ("coordinator", "metrics_port"): 8998})
    assert made.models[0].address == "127.0.0.1:9003"
