"""The programs take what the chart gives them: every flag is a setting, and the releases run, answer and end."""

from __future__ import annotations

import json
import re
import shlex
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from typer.main import get_command

from outrider.cli.app import app
from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, Section, TargetSettings
from outrider.config.flags import parse_flags
from outrider.config.loading import load
from outrider.telemetry.tracing.activation import exporter_names
from outrider.telemetry.tracing.names import OTLP
from tests.end_to_end.commands import wait_until
from tests.k8s.cases import ALL
from tests.k8s.programs import Pods, pods, says_serving
from tests.k8s.release import Release

Releases = Callable[[str], Release]
SECTIONS: dict[str, type[Section]] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
}
MODELS_AND_COORDINATOR = ("target", "draft", "coordinator")
PROGRAMS = {
    "target": "outrider_target",
    "draft": "outrider_draft",
    "coordinator": "outrider_coordinator",
    "gateway": "gateway",
}
"""Module, or subcommand of ``outrider``."""
WITNESSES = {
    "target": "outrider_sessions_open",
    "draft": "outrider_sessions_open",
    "coordinator": "outrider_requests_total",
    "gateway": "outrider_http_requests_total",
}
"""A metric that each service counts a completion in."""


def services(release: Release) -> list[str]:
    return [c["name"] for w in release.workloads() for c in w.spec["containers"] if c["name"] in SECTIONS]


@pytest.mark.parametrize("name", ALL)
def test_every_flag_is_a_setting_and_means_what_was_given(release: Releases, name: str) -> None:
    rendered = release(name)
    for service in services(rendered):
        section, flags = SECTIONS[service], rendered.flags(service)
        settings = load(section, flags, environ={})
        given, config = parse_flags(section, flags)
        assert config is None
        assert len(given) == len(flags), "no flag twice"
        container = rendered.workload_of(service).container(service)
        assert container["command"][-1] == PROGRAMS[service]
        assert (
            settings.model_dump()["drain_grace_s"] < rendered.workload_of(service).spec["terminationGracePeriodSeconds"]
        )


def test_settings_arrive_as_they_were_given(release: Releases) -> None:
    rendered = release("settings")
    target = load(TargetSettings, rendered.flags("target"), environ={})
    coordinator = load(CoordinatorSettings, rendered.flags("coordinator"), environ={})
    assert (target.kv_cache_bytes, target.log_level) == (20_000_000_000, "debug")
    assert (coordinator.disable_logprobs, coordinator.posterior_alpha) == (True, 0.25)


@pytest.mark.parametrize("name", ALL)
def test_variables_are_no_settings_by_mistake(release: Releases, name: str) -> None:
    for workload in release(name).workloads():
        for container in workload.spec["containers"]:
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names))
            # The SDK's own; any other variable of this name would be taken for a setting.
            assert {n for n in names if n.startswith("OUTRIDER_")} <= {"OUTRIDER_API_TOKEN"}


def test_torchrun_takes_the_command_of_a_group(release: Releases) -> None:
    from torch.distributed.run import get_args_parser

    given = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    container = release("multi-host").workload_of("target").container("target")
    command = " ".join([*container["command"][1:], *container["args"]])
    words = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], command).split()
    taken = get_args_parser().parse_args(words)
    assert (taken.nnodes, taken.nproc_per_node, taken.node_rank, taken.master_addr) == ("2", "8", 1, "leader")
    assert (taken.module, taken.training_script) == (True, "outrider_target")
    settings = load(TargetSettings, taken.training_script_args, environ={})
    assert settings.tensor_parallel_size == int(taken.nnodes) * int(taken.nproc_per_node)


def test_the_variables_for_traces_turn_them_on(release: Releases) -> None:
    for service in SECTIONS:
        container = release("tracing").workload_of(service).container(service)
        variables = {variable["name"]: variable.get("value", "") for variable in container["env"]}
        assert exporter_names(variables) == (OTLP,)
        assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4317"
        assert variables["OTEL_SERVICE_NAME"] == f"outrider-{service}"
        off = release("no-draft" if service != "draft" else "two-gpus").workload_of(service).container(service)
        assert exporter_names({variable["name"]: variable.get("value", "") for variable in off["env"]}) == ()


def completion(found: Pods, *, token: str = "", ca_file: Path | None = None) -> tuple[int, int]:
    """HTTP status and number of tokens of a completion that the gateway gives."""
    body = {"model": "", "prompt": "def f(", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http{'s' * (ca_file is not None)}://{found.address('gateway')}/v1/completions",
        json.dumps({key: value for key, value in body.items() if value != ""}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {token}"},
    )
    context = None if ca_file is None else ssl.create_default_context(cafile=str(ca_file))
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return error.code, 0


def until(found: Pods, service: str, probe: str) -> None:
    def passed() -> bool:
        assert not found.has_ended(service), found.said(service)
        return found.passes(service, probe)

    wait_until(passed, f"the {probe} probe of {service}", every_s=0.1)


def test_the_cpu_profile_runs_as_it_is_rendered(release: Releases) -> None:
    with pods(release("cpu-demo")) as found:
        found.start("coordinator")
        until(found, "coordinator", "startup")
        until(found, "coordinator", "liveness")
        assert not found.passes("coordinator", "readiness"), "there is no target"
        found.start("target")
        until(found, "target", "startup")
        until(found, "coordinator", "readiness")
        found.start("draft")
        until(found, "draft", "startup")
        found.start("gateway")
        until(found, "gateway", "startup")
        until(found, "gateway", "readiness")
        assert all(found.passes(service, "liveness") and found.passes(service, "readiness") for service in SECTIONS)
        outcome = found.run_test()
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stdout.strip()
        assert completion(found) == (200, 4)
        for service, metric in WITNESSES.items():
            assert f"\n{metric}{{" in found.metrics(service)
        assert found.terminate() == dict.fromkeys(SECTIONS, 0)


def test_with_tls_and_tokens_every_hop_is_closed_to_strangers_and_open_to_its_own(release: Releases) -> None:
    with pods(release("cpu-with-tls")) as found:
        authority = trustme.CA()
        for service in [*SECTIONS, "test"]:
            certificate = authority.issue_cert("127.0.0.1", f"rider-outrider-{service}")
            for secret in ("tls", "user"):
                folder = found.folder / service / secret
                folder.mkdir(parents=True)
                authority.cert_pem.write_to_path(folder / "ca.crt")
                certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
                certificate.private_key_pem.write_to_path(folder / "tls.key")
            for secret, token in (("api-token", "user-1\nuser-2\n"), ("link-token", "link"), ("token", "user-2")):
                (found.folder / service / secret).mkdir()
                (found.folder / service / secret / "token").write_text(token)
        for service in SECTIONS:
            found.start(service)
        for service in SECTIONS:
            until(found, service, "startup")
            until(found, service, "readiness")
            assert found.passes(service, "liveness")
            # Without TLS and a certificate nobody is answered.
            assert service == "gateway" or not says_serving(found.address(service), "liveness")
        authority_file = found.folder / "test" / "tls" / "ca.crt"
        assert completion(found, token="user-1", ca_file=authority_file) == (200, 4)
        assert completion(found, token="user-3", ca_file=authority_file) == (401, 0)
        outcome = found.run_test()
        assert outcome.returncode == 0, outcome.stderr
        (found.folder / "test" / "token" / "token").write_text("user-3")
        outcome = found.run_test()
        assert outcome.returncode == 1
        assert "token" in outcome.stderr


def test_in_one_pod_the_services_meet_on_sockets(release: Releases) -> None:
    with pods(release("cpu-in-one-pod")) as found:
        for service in MODELS_AND_COORDINATOR:
            found.start(service)
        for service in ("target", "coordinator"):
            until(found, service, "startup")
            until(found, service, "readiness")
        until(found, "draft", "liveness")
        assert found.address("target") == f"unix:{found.folder}/target.sock"
        outcome = found.run_test()
        assert outcome.returncode == 0, outcome.stderr
        assert found.terminate() == dict.fromkeys(MODELS_AND_COORDINATOR, 0)


@pytest.mark.parametrize("name", ["two-gpus", "tls", "given-certificates", "all-in-one-pod"])
def test_the_first_command_of_the_notes_is_one_that_there_is(release: Releases, name: str) -> None:
    rendered = release(name)
    (line,) = [line for line in rendered.notes.splitlines() if line.strip().startswith("outrider generate ")]
    (pod,) = rendered.of_kind("Pod")
    (container,) = pod["spec"]["containers"]
    for words in (shlex.split(line)[1:], [*container["command"][1:], *container["args"]]):
        context = get_command(app).make_context("outrider", words[:1], resilient_parsing=True)
        command = get_command(app).get_command(context, "generate")  # type: ignore[attr-defined]
        taken = command.make_context("generate", words[1:]).params
        assert taken["prompt"] == "def fibonacci(n):"
        assert bool(taken["tls_ca_file"]) == any(
            flag.startswith("--tls-cert-file") for flag in rendered.flags("coordinator")
        )
    # Files that the command reads are made by the lines before it.
    for option, file in (("--tls-ca-file", "ca.crt"), ("--token-file", "token")):
        assert (f"{option} {file}" in line) == (f"> {file}\n" in rendered.notes)


@pytest.mark.slow
def test_a_group_of_hosts_becomes_one_target_and_ends_as_one(release: Releases) -> None:
    with pods(release("two-hosts")) as found:
        group = found.start_group("target")

        def ready() -> bool:
            assert not any(found.has_ended(name) for name in group), "".join(map(found.said, group))
            return found.passes("target", "readiness")

        wait_until(ready, "the leader", every_s=0.5)
        for name in group:
            found.processes[name].send_signal(signal.SIGTERM)
        for name in group:
            found.processes[name].wait(found.release.workload_of("target").spec["terminationGracePeriodSeconds"])
        leader, worker = map(found.said, group)
        assert '"message": "stopped"' in leader, "it drained, and was not killed"
        assert "SIGKILL" not in leader + worker


def test_the_notes_say_what_is_left_open(release: Releases) -> None:
    def says(name: str, words: str) -> bool:
        return words in release(name).notes

    assert says("keda", "autoscaling asks Prometheus for series with the labels")
    assert not says("four-plus-one", "autoscaling asks")
    assert not says("two-gpus", "autoscaling asks")
    assert says("no-network-policy", "every pod of the cluster can call the models")
