"""Renderer of a chart with Helm's own engine, without a cluster: a line of JSON in, a line of JSON out.

Runs in the environment of ``scripts/chart/helm_environment.sh`` (Python 3.12, helm-sdkpy), not in the project's own.
In: ``{"chart": path, "values": {...}, "release": name, "namespace": name, "kubernetes": version}``, the last as in
"v1.30.0" and optional, or ``{"lint": path}``.
Out: ``{"manifest": text, "notes": text}``, ``{"messages": [...]}`` or ``{"error": what Helm says}``.

Helm's library has no ``template``: the chart is installed into an API server that says yes to everything
(``api_stub.py``), with Helm's record of it kept in memory: start it with HELM_DRIVER=memory, which Helm reads when the
process begins.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import api_stub
import helm_sdkpy  # type: ignore[import-not-found]


def main() -> None:
    """Answer each line of standard input until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        clusters: dict[str, Path] = {}
        for line in sys.stdin:
            request = json.loads(line)
            version = request.get("kubernetes", api_stub.VERSION)
            if version not in clusters:
                clusters[version] = Path(folder) / version
                clusters[version].write_text(json.dumps(_kubeconfig(api_stub.start(version))), encoding="utf-8")
            print(json.dumps(answer(request, str(clusters[version]))), flush=True)


def answer(request: dict[str, Any], kubeconfig: str) -> dict[str, Any]:
    """Objects that Helm renders for one request."""
    configuration = helm_sdkpy.Configuration(namespace=request.get("namespace", "default"), kubeconfig=kubeconfig)
    try:
        if "lint" in request:
            report = asyncio.run(helm_sdkpy.Lint(configuration).run(request["lint"]))
            return {"messages": report.get("Messages") or []}
        install = helm_sdkpy.Install(configuration)
        release = asyncio.run(install.run(request["release"], request["chart"], request["values"], wait=False))
    except helm_sdkpy.HelmError as error:
        return {"error": str(error)}
    hooks = [f"---\n# Source: {hook['path']}\n{hook['manifest']}" for hook in release.get("hooks") or []]
    return {"manifest": "".join([release["manifest"], *hooks]), "notes": release["info"].get("notes", "")}


def _kubeconfig(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "stub", "cluster": {"server": server}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
        "users": [{"name": "stub", "user": {}}],
        "current-context": "stub",
    }


if __name__ == "__main__":
    main()
