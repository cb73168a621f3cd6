"""A stub of a Kubernetes API server: the discovery that Helm's engine needs to install, and yes to every object.

It knows the kinds that the chart may render, and stores nothing.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

VERSION = "v1.34.0"
"""The first with every kind that the chart renders."""
KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "gateway.networking.k8s.io/v1": ("BackendTLSPolicy", "GRPCRoute", "HTTPRoute"),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "resource.k8s.io/v1": ("ResourceClaimTemplate",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
}


def start(version: str = VERSION) -> str:
    """URL of a server that calls itself this version of Kubernetes, on a free port until the process ends."""
    server = _StubServer(("127.0.0.1", 0), _Handler)
    server.version = version
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


class _StubServer(http.server.ThreadingHTTPServer):
    version = VERSION


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _StubServer
    # Headers and body are two writes: the second would otherwise wait 40 ms for the first to be acknowledged.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Discovery; no object exists yet."""
        path = self.path.partition("?")[0]
        answer = _version(self.server.version) if path == "/version" else _DISCOVERY.get(path)
        if answer is None:
            self._send(
                404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            )
        else:
            self._send(200, answer)

    def do_POST(self) -> None:
        """An object is made: it is what was sent."""
        length = int(self.headers.get("Content-Length", 0))
        self._send(201, json.loads(self.rfile.read(length)))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _group(group_version: str) -> dict[str, Any]:
    name, _, version = group_version.partition("/")
    entry = {"groupVersion": group_version, "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _resource(kind: str) -> dict[str, Any]:
    plural = kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"
    return {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["create", "get", "patch"]}


def _version(version: str) -> dict[str, Any]:
    major, minor, _ = version.removeprefix("v").split(".")
    return {"major": major, "minor": minor, "gitVersion": version}


_ROOTS: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(key) for key in KINDS if "/" in key]},
}
_DISCOVERY = _ROOTS | {
    f"/{'apis' if '/' in key else 'api'}/{key}": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": key,
        "resources": [_resource(kind) for kind in kinds],
    }
    for key, kinds in KINDS.items()
}
