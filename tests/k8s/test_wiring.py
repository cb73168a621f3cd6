"""What refers to something else in a release refers to what is there: selectors, ports, probes, volumes, policies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from outrider.telemetry.metrics import catalogue
from outrider.telemetry.tracing import pipeline
from tests.k8s.cases import ALL
from tests.k8s.helm import CHART
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
        assert workload.spec["terminationGracePeriodSeconds"] > waited + drain + 2 * pipeline._CLOSE_S
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        if container["command"][0] == "torchrun":
            assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] or 0) > drain


@EVERY_CASE
def test_no_rollout_asks_for_a_gpu_more(release: Releases, name: str) -> None:
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
    if not rendered.of_kind("NetworkPolicy"):
        pytest.skip("this case has none")
    for workload in rendered.workloads():
        if workload.component == "test":
            continue
        rules = admitted(rendered, workload)
        ports = container_ports(workload)
        called = {number for port, number in ports.items() if not port.startswith("health")}
        assert set(rules) == called, "every port that somebody calls, and none besides; probes come from the node"
        if workload.component in ("target", "draft"):
            (caller,) = rules[ports["grpc"]]
            assert [w.component for w in chosen(rendered, caller["podSelector"]["matchLabels"])] == ["coordinator"]


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
        found = rendered.one("Service", host)
        assert found["spec"]["clusterIP"] == "None"
        (workload,) = chosen(rendered, found["spec"]["selector"])
        assert container_ports(workload)["grpc"] == int(port)
        policies = rendered.of_kind("NetworkPolicy")
        egress = [rule for p in policies if p["metadata"]["name"] == coordinator.name for rule in p["spec"]["egress"]]
        to = [
            peer["podSelector"]["matchLabels"]
            for rule in egress
            for peer in rule.get("to", [])
            if {"port": int(port), "protocol": "TCP"} in rule["ports"]
        ]
        assert not policies or [workload] in [chosen(rendered, labels) for labels in to]


@pytest.mark.parametrize(
    ("name", "first"),
    [("same-node", {"target", "draft"}), ("lookup-on-one-node", {"target"}), ("cpu-on-one-node", set(SERVICES))],
)
def test_on_one_node_pods_follow_those_with_gpus(release: Releases, name: str, first: set[str]) -> None:
    # Whoever is asked for by its own rule may be placed while nobody is there yet.
    rendered = release(name)
    pods = [workload for workload in rendered.workloads() if workload.component != "test"]
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
    (ingress,) = release("ingress").of_kind("Ingress")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    service = release("ingress").one("Service", backend["name"])
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    assert backend["name"].endswith("-coordinator")


@pytest.mark.parametrize("case", ["keda", "hpa"])
def test_scaling_asks_for_a_metric_that_coordinators_have(release: Releases, case: str) -> None:
    (gauge,) = [spec for spec in catalogue.CATALOGUE if spec.name == "outrider_num_requests_waiting"]
    assert gauge.kind is catalogue.Kind.GAUGE
    assert "coordinator" in gauge.roles
    scalers = [*release(case).of_kind("ScaledObject"), *release(case).of_kind("HorizontalPodAutoscaler")]
    asked = set(re.findall(r"outrider_\w+", json.dumps([found["spec"] for found in scalers])))
    assert asked == {gauge.name}


def test_the_dashboard_and_the_rules_arrive_as_their_files_are(release: Releases) -> None:
    rendered = release("monitors")
    (rules,) = rendered.of_kind("PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    (dashboard,) = rendered.of_kind("ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    text = (CHART / "files" / "dashboard.json").read_text(encoding="utf-8")
    assert json.loads(dashboard["data"]["outrider.json"]) == json.loads(text)


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
        assert sorted(scraped) == ["coordinator", "draft", "target"]
