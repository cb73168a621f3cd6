"""The programs of a release as processes of this machine, with the flags and variables that the chart gives them.

What a cluster would supply is put in place of what stands in the manifest: ports that are free here for the pod's,
this host for a Service's name, folders for volumes, the CPU for a GPU. Everything else is as rendered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.stack.held_ports import hold_port
from tests.k8s.release import Object, Release

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
_PORTS = ("--port", "--metrics-port", "--health-port", "--master-port")
POD_IP = "127.0.0.1"
_PROGRAMS = {"python": [sys.executable], "outrider": [sys.executable, "-m", "outrider.cli"]}
"""The image's programs, here."""


class Pods:
    """The services of a release, none of them started yet. A Secret's file is at <folder>/<service>/<secret>/<key>."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.release = release
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._agents: list[str] = []

    def start(self, service: str) -> None:
        """Start a service's program."""
        container = self.release.workload_of(service).container(service)
        command = [self._here(word, service) for word in [*container["command"], *container["args"]]]
        with (self.folder / f"{service}.log").open("wb") as log:
            self.processes[service] = subprocess.Popen(
                [*_PROGRAMS[command[0]], *command[1:]], env=self._environment(container), stdout=log, stderr=log
            )

    def start_group(self, service: str) -> list[str]:
        """Start what each pod of a service's LeaderWorkerSet runs, the leader's first; their names here."""
        (group,) = self.release.of_kind("LeaderWorkerSet")
        template = group["spec"]["leaderWorkerTemplate"]
        roles = ["leader", *["worker"] * (template["size"] - 1)]
        for index, role in enumerate(roles):
            (container,) = template[f"{role}Template"]["spec"]["containers"]
            # What the set's controller adds to each pod; the leader's name is published before it is ready.
            given = {"GROUP_SIZE": str(template["size"]), "WORKER_INDEX": str(index), "LEADER_ADDRESS": "localhost"}
            command = [self._here(word, service) for word in [*container["command"], *container["args"]]]
            for key, value in given.items():
                command = [word.replace(f"$(LWS_{key})", value) for word in command]
            assert command[0] == "torchrun"
            with (self.folder / f"{service}-{index}.log").open("wb") as log:
                self.processes[f"{service}-{index}"] = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *command[1:]],
                    env=self._environment(container), stdout=log, stderr=log,
                )  # fmt: skip
            self._agents.append(f"{service}-{index}")
        return list(self._agents)

    def flags(self, service: str) -> list[str]:
        """A service's flags, as they are here."""
        return [self._here(flag, service) for flag in self.release.flags(service)]

    def address(self, service: str) -> str:
        """Address of a service."""
        flags = dict(flag.split("=", 1) for flag in self.flags(service) if "=" in flag)
        return flags["--host"] if flags["--host"].startswith("unix:") else f"{POD_IP}:{flags['--port']}"

    def passes(self, service: str, probe: str) -> bool:
        """True if kubelet would be content: asks what the probe asks."""
        container = self.release.workload_of(service).container(service)
        question = container[f"{probe}Probe"]
        if "grpc" in question:
            return says_serving(f"{POD_IP}:{self.port(question['grpc']['port'])}", question["grpc"].get("service", ""))
        numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        scheme = question["httpGet"].get("scheme", "HTTP").lower()
        return _answers(
            f"{scheme}://{POD_IP}:{self.port(numbers[question['httpGet']['port']])}{question['httpGet']['path']}"
        )

    def metrics(self, service: str) -> str:
        """Metrics that Prometheus reads."""
        ports = {
            port["name"]: port["containerPort"]
            for port in self.release.workload_of(service).container(service)["ports"]
        }
        with urllib.request.urlopen(f"http://{POD_IP}:{self.port(ports['metrics'])}/metrics", timeout=120) as answer:
            return str(answer.read().decode())

    def has_ended(self, service: str) -> bool:
        """True if its process has."""
        return self.processes[service].poll() is not None

    def said(self, service: str) -> str:
        """Output of the process."""
        return (self.folder / f"{service}.log").read_text(encoding="utf-8", errors="replace")

    def terminate(self) -> dict[str, int]:
        """End of containers as by kubelet; the exit code of each."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(self._grace_s(name)) for name, process in self.processes.items()}

    def run_test(self) -> subprocess.CompletedProcess[str]:
        """Command that ``helm test`` runs."""
        (pod,) = self.release.of_kind("Pod")
        (container,) = pod["spec"]["containers"]
        command = [self._here(word, "test") for word in [*container["command"], *container["args"]]]
        assert command[0] == "outrider"
        return subprocess.run(
            [sys.executable, "-m", "outrider.cli", *command[1:]],
            env=self._environment(container), capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    def port(self, number: int) -> int:
        """The port here that stands for one of a pod's."""
        return self.ports.setdefault(str(number), hold_port())

    def close(self) -> None:
        """Kill what is left; what has started processes of its own ends them first."""
        for name, process in self.processes.items():
            if name in self._agents:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(120)
            process.kill()
            process.wait()

    def _grace_s(self, service: str) -> float:
        return float(self.release.workload_of(service).spec["terminationGracePeriodSeconds"])

    def _here(self, word: str, service: str) -> str:
        name, _, value = word.partition("=")
        if name in _PORTS:
            return f"{name}={self.port(int(value))}"
        if name == "--device":
            return f"{name}=cpu"
        if name in ("--host", "--health-host", "--metrics-host") and not value.startswith("unix:"):
            return f"{name}={POD_IP}"
        if name in (
            "--target-address",
            "--draft-address",
            "--coordinator-address",
            "--address",
        ) and not value.startswith("unix:"):
            return f"{name}={POD_IP}:{self.port(int(value.rpartition(':')[2]))}"
        if name == "--model":
            return f"{name}={PAIR / Path(value).name}"
        return word.replace("unix:/run/outrider/", f"unix:{self.folder}/").replace(
            "=/etc/outrider/", f"={self.folder}/{service}/"
        )

    def _environment(self, container: Object) -> dict[str, str]:
        given = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
        caches = {key: value.replace("/var/cache/outrider", str(self.folder)) for key, value in given.items()}
        return {**os.environ, **caches, "POD_NAME": "here", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def pods(release: Release) -> Iterator[Pods]:
    """The services of a release, in a short-named folder: socket files must fit into a hundred bytes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Pods(release, Path(folder))
        try:
            yield found
        finally:
            found.close()


def says_serving(address: str, service: str) -> bool:
    """True if plain gRPC health at an address says so of a service."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60, wait_for_ready=False)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(url: str) -> bool:
    # As kubelet, which trusts any certificate.
    handlers = [
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    ]
    opener: Callable[..., object] = urllib.request.build_opener(*handlers).open
    try:
        opener(url, timeout=60)
    except (urllib.error.URLError, OSError):
        return False
    return True
