"""As much of a Kubernetes API server as Helm's engine asks for while it installs: discovery, and yes to every object.

Knows no chart: it lists the kinds that a chart of ours may render. Stores nothing.
"""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

VERSION = "v1.32.0"
KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "gateway.networking.k8s.io/v1": ("GRPCRoute",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
}


def start() -> str:
    """Serve on a free port of the loopback until the process ends; the server's URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: the second would otherwise wait 40 ms for the first to be acknowledged.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Discovery; no object exists yet."""
        path = self.path.partition("?")[0]
        answer = _DISCOVERY.get(path)
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


_ROOTS: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": VERSION.split(".")[1], "gitVersion": VERSION},
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
