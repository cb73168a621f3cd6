"""Helm's own engine, for tests: renders the chart, lints it, and gives what Helm says when it refuses.

Knows how the engine is got and spoken to (``scripts/chart``). Knows nothing of what the chart holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.k8s.release import Release, parse

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "outrider"
RELEASE = "rider"
NAMESPACE = "serving"
_ENVIRONMENT = ROOT / ".cache" / "helm"


class HelmMissingError(Exception):
    """Helm's engine cannot be had on this machine."""


class RefusedError(Exception):
    """Helm refused the values; the text is what a user reads."""


class Helm:
    """One process of the engine. Not for several threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [_python(), ROOT / "scripts" / "chart" / "renderer.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HELM_DRIVER": "memory"},
        )

    def render(self, values: Mapping[str, Any], **cluster: str) -> Release:
        """The chart with these values; ``RefusedError`` when Helm refuses them.

        ``cluster`` may give other ``release`` and ``namespace`` names, and the version of ``kubernetes``.
        """
        return parse(*self.render_text(values, **cluster))

    def render_text(self, values: Mapping[str, Any], **cluster: str) -> tuple[str, str]:
        """The manifest and the notes as text."""
        request = {"chart": str(CHART), "values": values, "release": RELEASE, "namespace": NAMESPACE, **cluster}
        answer = self._ask(request)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["manifest"], answer["notes"]

    def lint(self) -> list[dict[str, Any]]:
        """Remarks of ``helm lint``; a severity above 1 is a warning or an error."""
        messages: list[dict[str, Any]] = self._ask({"lint": str(CHART)})["messages"]
        return messages

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _python() -> str:
    script = ROOT / "scripts" / "chart" / "helm_environment.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    made = subprocess.run([script, _ENVIRONMENT], env=environment, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise HelmMissingError(made.stderr.strip())
    return made.stdout.strip()
