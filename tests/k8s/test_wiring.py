"""References within a release lead to objects that exist: selectors, ports, probes, volumes, policies."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.config import CoordinatorSettings, load
from outrider.telemetry.metrics import catalogue
from outrider.telemetry.tracing import pipeline
from tests.k8s.cases import ALL, MODELS, Values, over
from tests.k8s.helm import CHART, Helm
from tests.k8s.release import Object, Release, Workload

EVERY_CASE = pytest.mark.parametrize("name", ALL)
Releases = Callable[[str], Release]
SERVICES = ("target", "draft", "coordinator")


def chosen(release: Release, selector: Object) -> list[Workload]:
    # A group's leaders get this label from their controller.
    wanted = {key: value for key, value in selector.items() if key != "leaderworkerset.sigs.k8s.io/worker-index"}
    return [workload for workload in release.workloads() if wanted.items() <= workload.labels.items()]


def container_ports(workload: Workload) -> dict[str, int]:
    ports = [port for container in workload.spec["containers"] for port in container.get("ports", [])]
    by_name = {port["name"]: port["containerPort"] for port in ports}
    assert len(by_name) == len(set(by_name.values())) == len(ports), "names and numbers are unique in a pod"
    return by_name


def programs(release: Release) -> Iterator[tuple[Workload, Object]]:
    """Every service's container; not the test's."""
    for workload in release.workloads():
        if workload.component != "test":
            yield from ((workload, found) for found in workload.spec["containers"] if found["name"] in SERVICES)


@EVERY_CASE
def test_services_choose_pods_and_ports_that_exist(release: Releases, name: str) -> None:
    for service in release(name).of_kind("Service"):
        (workload,) = chosen(release(name), service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert container_ports(workload)[port["targetPort"]] == port["port"]


@EVERY_CASE
def test_owners_choose_their_own_pods(release: Releases, name: str) -> None:
    for kind in ("Deployment", "PodDisruptionBudget"):
        for found in release(name).of_kind(kind):
            (workload,) = chosen(release(name), found["spec"]["selector"]["matchLabels"])
            assert kind == "PodDisruptionBudget" or workload.name == found["metadata"]["name"]


@EVERY_CASE
def test_probes_go_to_ports_of_their_container(release: Releases, name: str) -> None:
    for _, container in programs(release(name)):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            question = container.get(probe, {})
            if "grpc" in question:
                assert question["grpc"]["port"] == ports["grpc"]
            elif question:
                assert question["httpGet"]["port"] in ports
        assert "livenessProbe" in container


@EVERY_CASE
def test_mounts_have_volumes_and_volumes_have_mounts(release: Releases, name: str) -> None:
    for template in release(name).pod_templates():
        spec = template["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        every = [*spec["containers"], *spec.get("initContainers", [])]
        mounts = {mount["name"] for container in every for mount in container.get("volumeMounts", [])}
        assert len(volumes) == len(set(volumes))
        assert set(volumes) == mounts


@EVERY_CASE
def test_pods_are_locked_down(release: Releases, name: str) -> None:
    for template in release(name).pod_templates():
        spec = template["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        every = [*spec["containers"], *spec.get("initContainers", [])]
        own = {*SERVICES, *(f"download-{service}" for service in SERVICES), "generate"}
        for container in (found for found in every if found["name"] in own):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert name == "own-security" or "add" not in security["capabilities"]
    assert all(found["automountServiceAccountToken"] is False for found in release(name).of_kind("ServiceAccount"))


def test_security_can_be_changed_for_a_cluster_that_chooses_users(release: Releases) -> None:
    rendered = release("own-security")
    for template in rendered.pod_templates():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(template["spec"]["securityContext"])
    target = rendered.workload_of("target").container("target")
    assert target["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@EVERY_CASE
def test_what_programs_write_to_is_a_volume(release: Releases, name: str) -> None:
    for _, container in programs(release(name)):
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        assert {"/tmp", "/dev/shm", "/var/cache/outrider"} <= set(writable)
        variables = {variable["name"]: variable.get("value", "") for variable in container["env"]}
        for key in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            assert variables[key].startswith("/var/cache/outrider")


@EVERY_CASE
def test_the_grace_outlasts_the_drain(release: Releases, name: str) -> None:
    for workload, container in programs(release(name)):
        flags = dict(flag.split("=", 1) for flag in container["args"] if "=" in flag)
        drain = float(flags["--drain-delay-s"]) + float(flags["--drain-grace-s"])
        waited = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        # Then traces that are left are sent, to a collector that may hang.
        assert workload.spec["terminationGracePeriodSeconds"] > waited + drain + 2 * pipeline.CLOSE_S
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        if container["command"][0] == "torchrun":
            assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] or 0) > drain


@EVERY_CASE
def test_no_rollout_asks_for_a_gpu_more(release: Releases, name: str) -> None:
    if name in ("strategy", "pool"):
        pytest.skip("this case has strategies of its own")
    for workload, container in programs(release(name)):
        if any("/" in resource for resource in container["resources"].get("limits", {})):
            spec = workload.owner["spec"]
            rollout = (
                spec.get("strategy", {}).get("rollingUpdate") or spec["rolloutStrategy"]["rollingUpdateConfiguration"]
            )
            assert rollout["maxSurge"] == 0
            assert rollout["maxUnavailable"] == 1


@EVERY_CASE
def test_a_coordinator_is_ready_and_live_whatever_the_draft_does(release: Releases, name: str) -> None:
    workload = release(name).workload_of("coordinator")
    probes = {key: workload.container("coordinator")[f"{key}Probe"] for key in ("startup", "readiness", "liveness")}
    # An empty service name is the coordinator's own health: SERVING while a target is attached.
    for key, (path, service) in {
        "startup": ("/livez", "liveness"), "liveness": ("/livez", "liveness"), "readiness": ("/readyz", None)
    }.items():  # fmt: skip
        question = probes[key]
        assert (question["grpc"].get("service") if "grpc" in question else question["httpGet"]["path"]) in (
            path,
            service,
        )
    beside = [container for container in workload.spec["containers"] if container["name"] == "draft"]
    assert all("readinessProbe" not in container and "startupProbe" not in container for container in beside)


@EVERY_CASE
def test_scaled_workloads_exist_and_have_no_replicas_of_their_own(release: Releases, name: str) -> None:
    rendered = release(name)
    for found in [*rendered.of_kind("ScaledObject"), *rendered.of_kind("HorizontalPodAutoscaler")]:
        reference = found["spec"]["scaleTargetRef"]
        owner = rendered.one(reference["kind"], reference["name"])
        assert owner["apiVersion"] == reference["apiVersion"]
        assert "replicas" not in owner["spec"]
    scaled = {
        found["spec"]["scaleTargetRef"]["name"]
        for kind in ("ScaledObject", "HorizontalPodAutoscaler")
        for found in rendered.of_kind(kind)
    }
    for workload in rendered.workloads():
        if workload.component != "test" and workload.name not in scaled:
            assert "replicas" in workload.owner["spec"]


def admitted(release: Release, workload: Workload) -> dict[int, Any]:
    """Port -> who may reach it (None: anybody), by the policy of a workload's pods."""
    policies = [
        p
        for p in release.of_kind("NetworkPolicy")
        if workload in chosen(release, p["spec"]["podSelector"]["matchLabels"])
    ]
    (policy,) = policies
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    return {port["port"]: rule.get("from") for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}


@EVERY_CASE
def test_network_policies_admit_the_hops_that_exist_and_no_other(release: Releases, name: str) -> None:
    rendered = release(name)
    if not rendered.of_kind("NetworkPolicy") or name.startswith("pool"):
        pytest.skip("this case has none, or rules of its own for every pod")
    for workload in rendered.workloads():
        if workload.component == "test":
            continue
        rules = admitted(rendered, workload)
        ports = container_ports(workload)
        called = {number for port, number in ports.items() if not port.startswith("health")}
        assert set(rules) == called, "every port that somebody calls, and none besides; probes come from the node"
        if workload.component in ("target", "draft"):
            peers = [chosen(rendered, caller["podSelector"]["matchLabels"]) for caller in rules[ports["grpc"]]]
            is_called_by_drafts = workload.component == "target" and name.startswith("direct-channels")
            expected = ["coordinator", *(["draft"] if is_called_by_drafts else [])]
            assert [found.component for peer in peers for found in peer] == expected


@pytest.mark.parametrize("name", ["direct-channels", "direct-channels-with-tls", "pool"])
def test_drafts_may_call_their_targets(release: Releases, name: str) -> None:
    rendered = release(name)
    assert "--channels-between-hosts" in rendered.flags("coordinator")
    trusts = [flag for flag in rendered.flags("draft") if flag.startswith("--link-tls-ca-file=")]
    assert bool(trusts) == name.endswith("tls")
    target, draft = rendered.workload_of("target"), rendered.workload_of("draft")
    (policy,) = [p for p in rendered.of_kind("NetworkPolicy") if p["metadata"]["name"] == draft.name]
    port = {"port": container_ports(target)["grpc"], "protocol": "TCP"}
    to = [peer for rule in policy["spec"]["egress"] if port in rule["ports"] for peer in rule.get("to", [])]
    assert [target] in [chosen(rendered, peer["podSelector"]["matchLabels"]) for peer in to]
    if trusts:
        (certificate,) = [c for c in rendered.of_kind("Certificate") if c["metadata"]["name"] == draft.name]
        assert certificate["spec"]["usages"] == ["server auth", "client auth"]


def test_in_one_pod_no_channel_is_between_hosts(release: Releases) -> None:
    assert "--channels-between-hosts" not in release("direct-channels-in-one-pod").flags("coordinator")


def test_a_target_may_draft_with_another_releases_drafts(release: Releases) -> None:
    rendered = release("pool-target")
    assert "--draft-address=pool-outrider-draft:50052" in rendered.flags("coordinator")
    coordinator = rendered.workload_of("coordinator")
    (policy,) = [p for p in rendered.of_kind("NetworkPolicy") if p["metadata"]["name"] == coordinator.name]
    assert {"ports": [{"port": 50052, "protocol": "TCP"}]} in policy["spec"]["egress"]


def test_drafts_are_scaled_on_the_share_of_the_time_in_which_they_compute(release: Releases) -> None:
    (scaled,) = release("pool").of_kind("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "0.7"
    query = trigger["metadata"]["query"]
    assert 'service="rider-outrider-draft"' in query and 'stage=~"forward|sample"' in query
    name = re.findall(r"outrider_\w+", query.replace("rider-outrider-draft", ""))
    assert [each.removesuffix("_sum") for each in name] == ["outrider_forward_stage_seconds"]


@EVERY_CASE
def test_coordinators_may_reach_what_they_are_told_to_call(release: Releases, name: str) -> None:
    rendered = release(name)
    coordinator = rendered.workload_of("coordinator")
    flags = dict(flag.split("=", 1) for flag in rendered.flags("coordinator") if "=" in flag)
    for service in ("target", "draft"):
        address = flags.get(f"--{service}-address")
        if address is None:
            continue
        if address.startswith("unix:"):
            assert f"--host={address}" in rendered.flags(service)
            continue
        host, _, port = address.partition(":")
        if host.startswith("pool-"):
            continue  # of another release
        found = rendered.one("Service", host)
        assert found["spec"]["clusterIP"] == "None"
        (workload,) = chosen(rendered, found["spec"]["selector"])
        assert container_ports(workload)["grpc"] == int(port)
        policies = rendered.of_kind("NetworkPolicy")
        egress = [rule for p in policies if p["metadata"]["name"] == coordinator.name for rule in p["spec"]["egress"]]
        rules = [rule for rule in egress if {"port": int(port), "protocol": "TCP"} in rule["ports"]]
        to = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule.get("to", [])]
        if workload.spec.get("hostNetwork"):
            # Its address is the node's, which no podSelector matches.
            assert [rule for rule in rules if "to" not in rule]
        else:
            assert not policies or [workload] in [chosen(rendered, labels) for labels in to]


@pytest.mark.parametrize(
    ("name", "first"),
    [("same-node", {"target", "draft"}), ("lookup-on-one-node", {"target"}), ("cpu-on-one-node", set(SERVICES))],
)
def test_on_one_node_pods_follow_those_with_gpus(release: Releases, name: str, first: set[str]) -> None:
    # Whoever is asked for by its own rule may be placed while nobody is there yet.
    rendered = release(name)
    pods = [workload for workload in rendered.workloads() if workload.component != "test"]
    gateway = pods.pop(next(number for number, found in enumerate(pods) if found.component == "gateway"))
    assert "affinity" not in gateway.spec
    assert len(pods) == 3
    for workload in pods:
        affinity = workload.spec["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        (rather,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert rather["podAffinityTerm"]["topologyKey"] == term["topologyKey"] == "kubernetes.io/hostname"
        assert {found.component for found in pods if matches(term["labelSelector"], found.labels)} == first
        assert all(matches(rather["podAffinityTerm"]["labelSelector"], found.labels) for found in pods)


def matches(selector: Object, labels: Object) -> bool:
    (among,) = selector["matchExpressions"]
    assert among["operator"] == "In"
    return selector["matchLabels"].items() <= labels.items() and labels[among["key"]] in among["values"]


def test_in_one_pod_three_containers_share_sockets_and_memory(release: Releases) -> None:
    workload = release("same-pod").workload_of("coordinator")
    assert [container["name"] for container in workload.spec["containers"]] == ["target", "draft", "coordinator"]
    volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    for container in workload.spec["containers"]:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm"
        assert mounts["sockets"] == "/run/outrider"


def test_models_are_made_ready_for_what_the_coordinator_asks(release: Releases) -> None:
    for service in SERVICES:
        flags = release("four-plus-one").flags(service)
        assert [flag for flag in flags if "max-running-requests" in flag] == ["--max-running-requests=128"]
        assert [flag for flag in flags if "num-speculative-tokens" in flag] == ["--num-speculative-tokens=5"]
    assert not any("max-running-requests" in flag for flag in release("two-gpus").flags("target"))


_IN_IMAGE: Values = {"model": {"from": "image", "claim": "", "path": "/opt/outrider/pair/head"}}
_OTHER_CLAIM: Values = {"model": {"claim": "heads"}}


@pytest.mark.parametrize(
    ("target", "draft", "layers"),
    [
        ({}, {"settings": {"method": "eagle3"}}, ["eagle3:/models/small"]),
        ({}, {"settings": {"method": "dflash"}}, ["dflash:/models/small"]),
        (_IN_IMAGE, {**_IN_IMAGE, "settings": {"method": "eagle3"}}, ["eagle3:/opt/outrider/pair/head"]),
        ({}, {**_OTHER_CLAIM, "settings": {"method": "mtp"}}, ["-1"]),
        ({}, {**_OTHER_CLAIM, "settings": {"method": "eagle3"}}, []),
        ({}, {**_IN_IMAGE, "settings": {"method": "eagle3"}}, []),
        ({"settings": {"hidden_state_layers": "1,2"}}, {"settings": {"method": "eagle3"}}, ["1,2"]),
        ({}, {"enabled": False, "settings": {"method": "eagle3"}}, []),
        ({}, {"settings": {"method": "draft_model"}}, []),
        ({}, {}, []),
    ],
)
def test_the_target_hands_out_what_the_releases_head_reads(
    helm: Helm, target: Values, draft: Values, layers: list[str]
) -> None:
    rendered = helm.render(over(MODELS, {"target": target, "draft": draft}))
    found = [flag for flag in rendered.flags("target") if flag.startswith("--hidden-state-layers=")]
    assert found == [f"--hidden-state-layers={each}" for each in layers]


def test_gpus_follow_the_degree_and_the_hosts(release: Releases) -> None:
    def gpus(case: str, service: str, resource: str = "nvidia.com/gpu") -> int:
        container = release(case).workload_of(service).container(service)
        assert container["resources"]["limits"][resource] == container["resources"]["requests"][resource]
        return int(container["resources"]["limits"][resource])

    assert (gpus("four-plus-one", "target"), gpus("four-plus-one", "draft")) == (4, 1)
    assert gpus("multi-host", "target") == 8
    assert gpus("mig", "draft", "nvidia.com/mig-1g.10gb") == 1
    cpu = release("cpu-demo").workload_of("target").container("target")
    assert "nvidia.com/gpu" not in cpu["resources"].get("limits", {})


def test_all_pods_of_a_group_are_started_by_torchrun_alike(release: Releases) -> None:
    (group,) = release("multi-host").of_kind("LeaderWorkerSet")
    leader, worker = (group["spec"]["leaderWorkerTemplate"][f"{role}Template"]["spec"] for role in ("leader", "worker"))
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    (first,), (second,) = leader["containers"], worker["containers"]
    assert first["command"] == second["command"]
    assert first["command"][0] == "torchrun"
    assert "--nproc-per-node=8" in first["command"]
    assert first["args"] == second["args"]
    assert "ports" not in second
    assert not any(key.endswith("Probe") for key in second)
    selector = release("multi-host").one("Service", "rider-outrider-target")["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    ingress = next(
        p for p in release("multi-host").of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("target")
    )
    assert any("ports" not in rule for rule in ingress["spec"]["ingress"]), "ranks speak to one another on any port"


@EVERY_CASE
def test_a_groups_controller_is_free_to_make_its_service(release: Releases, name: str) -> None:
    # It makes one of the set's name that publishes pods before they are ready; torchrun would wait forever for another.
    services = {found["metadata"]["name"] for found in release(name).of_kind("Service")}
    for group in release(name).of_kind("LeaderWorkerSet"):
        assert group["metadata"]["name"] not in services
        # The label with a pod's revision, "<name>-<group>-<hash>", has room for 63.
        assert len(group["metadata"]["name"]) <= 47


def test_the_test_pod_calls_the_coordinators_service(release: Releases) -> None:
    for name in ALL:
        rendered = release(name)
        (pod,) = rendered.of_kind("Pod")
        # Deleted on success, it would be gone before Helm 3 asks for its log.
        annotations = {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation"}
        assert pod["metadata"]["annotations"] == annotations
        address = next(a for a in pod["spec"]["containers"][0]["args"] if a.startswith("--address=")).removeprefix(
            "--address="
        )
        host, _, port = address.partition(":")
        assert int(port) in [p["port"] for p in rendered.one("Service", host)["spec"]["ports"]]
        users = (
            admitted(rendered, rendered.workload_of("coordinator"))[int(port)]
            if rendered.of_kind("NetworkPolicy")
            else None
        )
        assert users is None or any(
            peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") == "test"
            for peer in users
        )


def test_certificates_bear_the_names_that_are_called(release: Releases) -> None:
    rendered = release("tls")
    for certificate in rendered.of_kind("Certificate"):
        name = certificate["metadata"]["name"]
        assert {name, f"{name}.serving", f"{name}.serving.svc"} <= set(certificate["spec"]["dnsNames"])
        assert rendered.one("Service", name)
        component = certificate["metadata"]["labels"]["app.kubernetes.io/component"]
        volumes = rendered.workload_of(component).spec["volumes"]
        assert certificate["spec"]["secretName"] in [v["secret"]["secretName"] for v in volumes if "secret" in v]
    usages = rendered.one("Certificate", "rider-outrider-coordinator")["spec"]["usages"]
    assert set(usages) == {"server auth", "client auth"}


def test_models_are_where_the_flag_says(release: Releases) -> None:
    for name in ALL:
        rendered = release(name)
        for _, container in programs(rendered):
            path = next(
                (f.partition("=")[2] for f in container["args"] if f.startswith(("--model=", "--tokenizer="))), None
            )
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"].startswith("model-")]
            if path is not None and not path.startswith("/opt/outrider/"):
                assert path.startswith(tuple(mounts))


def test_a_download_lands_where_the_model_is_read(release: Releases) -> None:
    spec = release("download-into-the-pod").workload_of("draft").spec
    (download,) = spec["initContainers"]
    assert download["command"][:4] == ["python", "/opt/outrider/download_model.py", "own/er", "/models/er"]
    assert "--model=/models/er" in release("download-into-the-pod").flags("draft")
    assert any(mount["mountPath"] == "/models" and not mount.get("readOnly") for mount in download["volumeMounts"])
    policy = next(
        p for p in release("download-into-the-pod").of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("draft")
    )
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in policy["spec"]["egress"]


def test_a_claim_is_made_once_and_is_the_one_that_is_mounted(release: Releases) -> None:
    (claim,) = release("one-claim-for-both").of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for service in ("target", "draft"):
        volumes = release("one-claim-for-both").workload_of(service).spec["volumes"]
        mounted = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
        assert mounted == [claim["metadata"]["name"]]


def test_connections_age_on_the_public_service_alone(release: Releases) -> None:
    def ages(case: str, service: str) -> list[str]:
        return [flag for flag in release(case).flags(service) if flag.startswith("--max-connection-age")]

    assert ages("two-gpus", "coordinator") == ["--max-connection-age-s=600"]
    assert ages("two-gpus", "target") == ages("two-gpus", "draft") == []


def test_a_route_leads_to_the_coordinators_service(release: Releases) -> None:
    (route,) = release("route").of_kind("GRPCRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = release("route").one("Service", backend["name"])
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    assert backend["name"].endswith("-coordinator")


def test_the_ingress_of_the_docs_leads_there_too(release: Releases) -> None:
    (ingress,) = release("ingress-of-grpc").of_kind("Ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    service = release("ingress-of-grpc").one("Service", backend["name"])
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    assert backend["name"].endswith("-coordinator")


@pytest.mark.parametrize("case", ["http", "http-route", "ingress-of-all-hosts"])
def test_http_leads_to_the_gateways_service(release: Releases, case: str) -> None:
    rendered = release(case)
    service = rendered.one("Service", "rider-outrider-gateway")
    (port,) = [port for port in service["spec"]["ports"] if port["name"] == "http"]
    for ingress in rendered.of_kind("Ingress"):
        (rule,) = ingress["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": "rider-outrider-gateway", "port": {"name": "http"}}
        assert (rule.get("host") is None) == (case == "ingress-of-all-hosts")
    for route in rendered.of_kind("HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": "rider-outrider-gateway", "port": port["port"]}]
        assert rule["timeouts"] == {"request": "0s"}
    assert len([*rendered.of_kind("Ingress"), *rendered.of_kind("HTTPRoute")]) == 1


def test_an_ingress_passes_requests_on_by_https_where_the_gateway_speaks_it(release: Releases, helm: Helm) -> None:
    backend = "nginx.ingress.kubernetes.io/backend-protocol"
    (ingress,) = release("https-ingress").of_kind("Ingress")
    assert ingress["metadata"]["annotations"] == {"a": "b", backend: "HTTPS"}
    (plain,) = release("ingress-of-all-hosts").of_kind("Ingress")
    assert "annotations" not in plain["metadata"]
    own = over(ALL["https-ingress"], {"ingress": {"annotations": {backend: "AUTO_HTTP"}}})
    assert helm.render(own).of_kind("Ingress")[0]["metadata"]["annotations"][backend] == "AUTO_HTTP"
    assert "The gateway speaks HTTPS alone" in release("https-ingress").notes
    assert "The gateway speaks HTTPS alone" not in release("ingress-of-all-hosts").notes


@pytest.mark.parametrize(("case", "component"), [("https-route", "gateway"), ("all-spread", "coordinator")])
def test_a_gateway_of_the_cluster_is_told_to_speak_tls_to_the_pods(
    release: Releases, helm: Helm, case: str, component: str
) -> None:
    (policy,) = release(case).of_kind("BackendTLSPolicy")
    name = f"rider-outrider-{component}"
    (target,) = policy["spec"]["targetRefs"]
    service = release(case).one("Service", target["name"])
    assert (target["kind"], target["name"]) == ("Service", name)
    assert target["sectionName"] in [port["name"] for port in service["spec"]["ports"]]
    assert policy["spec"]["validation"]["hostname"] in release(case).one("Certificate", name)["spec"]["dnsNames"]
    assert policy["spec"]["validation"]["caCertificateRefs"] == [
        {"group": "", "kind": "ConfigMap", "name": "cluster-ca"}
    ]
    assert not release("http-route").of_kind("BackendTLSPolicy")
    own = over(ALL["https-route"], {"httpRoute": {"backendTLS": {"enabled": False}}})
    assert not helm.render(own).of_kind("BackendTLSPolicy")
    assert "a policy of your own has to make the Gateway" in helm.render(own).notes


@pytest.mark.parametrize("case", ["two-gpus", "gateway", "same-pod", "same-node", "all-spread"])
def test_the_gateway_has_pods_of_its_own_and_calls_the_coordinators_service(release: Releases, case: str) -> None:
    rendered = release(case)
    workload = rendered.workload_of("gateway")
    assert [container["name"] for container in workload.spec["containers"] if container["name"] in SERVICES] == []
    (flag,) = [flag for flag in rendered.flags("gateway") if flag.startswith("--coordinator-address=")]
    host, _, port = flag.removeprefix("--coordinator-address=").partition(":")
    service = rendered.one("Service", host)
    assert int(port) in [found["port"] for found in service["spec"]["ports"]]
    assert host == "rider-outrider-coordinator"
    assert "affinity" not in workload.spec
    (policy,) = [p for p in rendered.of_kind("NetworkPolicy") if p["metadata"]["name"] == workload.name]
    callers = [rule for rule in policy["spec"]["egress"] if {"port": int(port), "protocol": "TCP"} in rule["ports"]]
    (peer,) = callers[0]["to"]
    (called,) = chosen(rendered, peer["podSelector"]["matchLabels"])
    assert called is not workload
    assert called.container("coordinator")


@pytest.mark.parametrize("name", ["two-gpus", "same-pod", "all-spread"])
def test_who_may_call_coordinators_includes_the_gateway(release: Releases, name: str) -> None:
    rendered = release(name)
    coordinator = rendered.workload_of("coordinator")
    service = rendered.one("Service", "rider-outrider-coordinator")
    (port,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
    users = admitted(rendered, coordinator)[port]
    labels = rendered.workload_of("gateway").labels
    assert users is None or any(
        (peer.get("podSelector") or {"matchLabels": {"": ""}})["matchLabels"].items() <= labels.items()
        for peer in users
    )


@EVERY_CASE
def test_a_coordinator_has_as_long_as_the_models_it_waits_for(release: Releases, name: str) -> None:
    rendered = release(name)
    deadlines = {
        workload.component: workload.owner["spec"]["progressDeadlineSeconds"]
        for workload in rendered.workloads()
        if workload.owner["kind"] == "Deployment"
    }
    for workload, container in programs(rendered):
        probe = container.get("startupProbe")
        if probe is None:
            continue
        starting = probe["periodSeconds"] * probe["failureThreshold"]
        waiting = deadlines.get("coordinator", deadlines.get("all", 0))
        assert waiting >= starting + 600, "its deadline follows the slowest model"
        assert deadlines.get(workload.component, waiting) >= starting + 600
    seconds = deadlines.get("coordinator", deadlines.get("all"))
    assert f"--timeout={seconds}s" in rendered.notes


def test_a_download_counts_into_the_deadline(release: Releases) -> None:
    def deadline(case: str, component: str) -> int:
        (found,) = [w for w in release(case).workloads() if w.component == component]
        return int(found.owner["spec"]["progressDeadlineSeconds"])

    assert deadline("two-gpus", "coordinator") == deadline("two-gpus", "target") == 1800 + 600
    assert deadline("four-plus-one", "target") == 1800 + 3600 + 600
    assert deadline("four-plus-one", "coordinator") == deadline("four-plus-one", "target")
    # Init containers of one pod run one after the other.
    assert deadline("downloads-in-one-pod", "all") == 1800 + 3 * 3600 + 600
    assert deadline("multi-host", "coordinator") == 3600 + 600
    assert deadline("cpu-demo", "coordinator") == 300 + 600


def test_targets_are_scaled_on_requests_that_run_or_wait(release: Releases) -> None:
    (scaler,) = release("keda").of_kind("ScaledObject")
    (trigger,) = scaler["spec"]["triggers"]
    own = '{namespace="serving", service="rider-outrider-coordinator"}'
    metrics = [f"outrider_num_requests_{state}" for state in ("running", "waiting")]
    assert trigger["metadata"]["query"] == " + ".join(f"sum({metric}{own})" for metric in metrics)
    for metric in metrics:
        assert catalogue.find(metric).kind is catalogue.MetricKind.GAUGE
        assert "coordinator" in catalogue.find(metric).roles
    assert release("keda").one("Service", "rider-outrider-coordinator")
    # Below it a coordinator has no more to run on each target; the queue would have to fill first.
    assert int(trigger["metadata"]["threshold"]) < load(CoordinatorSettings, [], environ={}).max_running_requests
    (by_query,) = release("drafts-by-a-query").of_kind("ScaledObject")
    assert by_query["spec"]["triggers"][0]["metadata"]["query"] == 'sum(outrider_sessions_open{role="draft"})'


def test_prometheus_adapter_serves_the_number_that_the_hpa_asks_for(release: Releases) -> None:
    (scaler,) = release("hpa").of_kind("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    page = (CHART.parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    (rule,) = yaml.safe_load(
        next(part for part in page.split("```yaml\n") if part.startswith("rules:")).split("```")[0]
    )["rules"]
    assert rule["name"]["as"] == metric["object"]["metric"]["name"]
    names = set(re.findall(r"outrider_num_requests_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
    assert names <= {spec.name for spec in catalogue.CATALOGUE}
    assert "<<.Series>>" in rule["metricsQuery"]
    assert "outrider_num_requests_waiting{<<.LabelMatchers>>}" in rule["metricsQuery"]
    assert rule["seriesQuery"].startswith("outrider_num_requests_running{")


def test_the_gateway_is_scaled_on_processor_time(release: Releases) -> None:
    (scaler,) = release("scaled-gateway").of_kind("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    container = release("scaled-gateway").workload_of("gateway").container("gateway")
    assert container["resources"]["requests"]["cpu"]


def test_the_dashboard_arrives_as_its_file_is(release: Releases) -> None:
    (dashboard,) = release("monitors").of_kind("ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    text = (CHART / "files" / "dashboard.json").read_text(encoding="utf-8")
    assert json.loads(dashboard["data"]["outrider.json"]) == json.loads(text)


def test_rules_match_this_release_alone(release: Releases) -> None:
    (rules,) = release("monitors").of_kind("PrometheusRule")
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    (group,) = rules["spec"]["groups"]
    (file,) = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [rule["alert"] for rule in file["rules"]]
    services = {f"rider-outrider-{service}" for service in (*SERVICES, "gateway")}
    assert services <= {found["metadata"]["name"] for found in release("monitors").of_kind("Service")}
    for rendered, written in zip(group["rules"], file["rules"], strict=True):
        used = re.findall(r"\b((?:outrider|process)_[a-z0-9_]+)", written["expr"])
        matchers = re.findall(
            r'\b(?:outrider|process)_[a-z0-9_]+\{namespace="serving",service=~"([^"]+)"', rendered["expr"]
        )
        assert len(matchers) == len(used) > 0
        assert all(set(matcher.split("|")) == services for matcher in matchers)
        without = re.sub(r'\{namespace="serving",service=~"[^"]+"\}', "", rendered["expr"])
        assert re.sub(r'namespace="serving",service=~"[^"]+",', "", without) == written["expr"]
        address = "https://docs.example.com/operations"
        link = f"{address}#{written['annotations']['operations_section']}"
        assert rendered["annotations"] == {"summary": written["annotations"]["summary"], "runbook_url": link}


def test_alerts_link_to_nothing_unless_they_have_a_url(helm: Helm) -> None:
    rendered = helm.render(over(MODELS, {"metrics": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}}))
    (rules,) = rendered.of_kind("PrometheusRule")
    assert {frozenset(rule["annotations"]) for rule in rules["spec"]["groups"][0]["rules"]} == {frozenset({"summary"})}


def test_two_coordinators_run_twice_as_many_requests(helm: Helm) -> None:
    scaled: Values = {
        "target": {"autoscaling": {"enabled": True, "requestsPerReplica": 100}},
        "coordinator": {"replicas": 2, "settings": {"max_running_requests": 64}},
    }
    assert helm.render(over(MODELS, scaled)).of_kind("ScaledObject")


def test_notes_have_an_empty_line_before_the_part_on_http(helm: Helm) -> None:
    notes = helm.render(over(MODELS, {"gateway": {"enabled": True}})).notes
    assert re.search(r"--stats[^\n]*\n\nOver HTTP", notes)


def test_an_alert_fires_when_no_coordinator_is_there(release: Releases) -> None:
    (rules,) = release("monitors").of_kind("PrometheusRule")
    (absent,) = [rule for rule in rules["spec"]["groups"][0]["rules"] if rule["expr"].startswith("absent(")]
    assert absent["labels"]["severity"] == "critical"


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH: PromQL's syntax is unchecked"
)
def test_promtool_accepts_the_rules_of_a_release(release: Releases, tmp_path: Path) -> None:
    (rules,) = release("monitors").of_kind("PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    outcome = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_common_labels_are_on_every_object_and_pod_and_select_nothing(release: Releases) -> None:
    rendered = release("common-labels")
    for found in rendered.objects:
        labels = found["metadata"]["labels"]
        assert labels["cost-centre"] == "7"
        assert labels["team"] == ("alerts" if found["kind"] == "PrometheusRule" else "search")
        assert "cost-centre" not in json.dumps(found["spec"].get("selector", {}) if "spec" in found else {})
    for workload in rendered.workloads():
        assert workload.labels["cost-centre"] == "7"
        assert workload.labels["team"] == ("search" if workload.component == "test" else "chat")


def test_a_strategy_of_ones_own_is_taken(release: Releases) -> None:
    rendered = release("strategy")
    assert rendered.workload_of("target").owner["spec"]["strategy"] == {"type": "Recreate"}
    assert rendered.workload_of("coordinator").owner["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == "50%"
    assert rendered.workload_of("draft").owner["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_pods_on_the_nodes_network_find_names_of_the_cluster(release: Releases) -> None:
    for workload, _ in programs(release("host-network")):
        on_node = workload.component in ("target", "draft")
        assert workload.spec.get("hostNetwork", False) is on_node
        assert workload.spec.get("dnsPolicy") == ("ClusterFirstWithHostNet" if on_node else None)
    assert "NetworkPolicies do not apply" in release("host-network").notes


def test_ports_and_ranges_of_the_services_that_users_call(release: Releases) -> None:
    grpc, http = (release("node-ports").one("Service", f"rider-outrider-{name}") for name in ("coordinator", "gateway"))
    assert [port.get("nodePort") for port in grpc["spec"]["ports"] if port["name"] == "grpc"] == [30051]
    assert [port.get("nodePort") for port in http["spec"]["ports"] if port["name"] == "http"] == [30080]
    assert grpc["spec"]["externalTrafficPolicy"] == "Local"
    grpc, http = (
        release("load-balancer").one("Service", f"rider-outrider-{name}") for name in ("coordinator", "gateway")
    )
    assert grpc["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert http["spec"]["loadBalancerSourceRanges"] == ["10.1.0.0/16"]
    assert http["spec"]["loadBalancerClass"] == "example.com/lb"


def test_images_are_pulled_with_the_secrets_given(release: Releases) -> None:
    wanted = [{"name": "registry"}, {"name": "models"}]
    assert [template["spec"]["imagePullSecrets"] for template in release("model-images").pod_templates()] == [
        wanted
    ] * 5
    assert release("pod-extras").workload_of("target").spec["imagePullSecrets"] == [{"name": "registry"}]


def test_a_model_in_an_image_is_mounted_from_it(release: Releases) -> None:
    def image(service: str) -> Object:
        volumes = release("model-images").workload_of(service).spec["volumes"]
        (found,) = [volume["image"] for volume in volumes if "image" in volume]
        return dict(found)

    assert image("target") == {"reference": "registry.example.com/llama:8b", "pullPolicy": "IfNotPresent"}
    assert image("draft")["pullPolicy"] == "Always"
    assert "--model=/models/models" in release("model-images").flags("target")
    assert "--model=/models" in release("model-images").flags("draft")


def test_a_bucket_is_fetched_with_its_keys_and_within_its_means(release: Releases) -> None:
    spec = release("buckets").workload_of("target").spec
    (download,) = spec["initContainers"]
    assert download["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert download["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    assert {"name": "AWS_ENDPOINT_URL", "value": "http://minio.storage:9000"} in download["env"]
    assert not any(word.startswith("--revision") for word in download["command"])
    # The keys are the download's; the program that serves users does not have them.
    assert "envFrom" not in release("buckets").workload_of("target").container("target")
    policies = {
        p["metadata"]["labels"]["app.kubernetes.io/component"]: p for p in release("buckets").of_kind("NetworkPolicy")
    }
    for component, asks in (("target", True), ("draft", True)):
        egress = policies[component]["spec"]["egress"]
        metadata = [rule for rule in egress if rule.get("to") == [{"ipBlock": {"cidr": "169.254.0.0/16"}}]]
        assert bool(metadata) is asks
    hub = next(
        p for p in release("download-into-the-pod").of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("draft")
    )
    assert "169.254" not in json.dumps(hub)


@pytest.mark.parametrize("case", ["one-gpu-dra", "shared-gpus"])
def test_target_and_draft_share_the_gpu_of_one_claim(release: Releases, case: str) -> None:
    (template,) = release(case).of_kind("ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 1
    workload = release(case).workload_of("target")
    (claim,) = workload.spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    for service in ("target", "draft"):
        resources = workload.container(service)["resources"]
        assert resources["claims"] == [{"name": claim["name"]}]
        assert "nvidia.com/gpu" not in json.dumps(resources)
    assert "claims" not in workload.container("coordinator")["resources"]


def test_one_gpu_is_shared_by_time_slices_of_it(release: Releases) -> None:
    workload = release("one-gpu").workload_of("target")
    shares = 0.0
    for service in ("target", "draft"):
        container = workload.container(service)
        assert container["resources"]["limits"]["nvidia.com/gpu.shared"] == 1
        (share,) = [f.partition("=")[2] for f in container["args"] if f.startswith("--gpu-memory-utilization=")]
        shares += float(share)
    assert shares < 1


def test_vllms_names_are_asked_for_where_there_are_any(release: Releases) -> None:
    flags = {service: release("vllm-names").flags(service) for service in SERVICES}
    assert {service: "--vllm-metric-names" in given for service, given in flags.items()} == {
        "target": True, "coordinator": True, "draft": False
    }  # fmt: skip
    assert "--vllm-metric-names" not in release("two-gpus").flags("coordinator")


def test_every_service_is_scraped(release: Releases) -> None:
    for case in ("monitors", "four-plus-one"):
        (monitor,) = release(case).of_kind("ServiceMonitor")
        selector = monitor["spec"]["selector"]
        (wanted,) = selector["matchExpressions"]
        scraped = [
            service["metadata"]["labels"]["app.kubernetes.io/component"]
            for service in release(case).of_kind("Service")
            if selector["matchLabels"].items() <= service["metadata"]["labels"].items()
            and service["metadata"]["labels"][wanted["key"]] in wanted["values"]
            and [port["name"] for port in service["spec"]["ports"] if port["name"] == "metrics"]
        ]
        assert sorted(scraped) == ["coordinator", "draft", "gateway", "target"]


def test_a_path_of_the_users_is_the_gateways_root_path(release: Releases) -> None:
    def root_paths(case: str) -> list[str]:
        return [flag for flag in release(case).flags("gateway") if flag.startswith("--root-path")]

    assert root_paths("http-route") == ["--root-path=/llama"]
    assert root_paths("http") == root_paths("gateway") == root_paths("ingress-of-all-hosts") == []
