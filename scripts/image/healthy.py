"""Exit status 0 when the service on the port given says that it is alive: an image's HEALTHCHECK.

Asks "liveness", which follows neither the target nor a drain. Kubernetes does not use it: its probes ask themselves.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main() -> int:
    """Ask once. The port is HEALTHCHECK_PORT, or the one that the process with id 1 was started with, or 50050."""
    address = f"127.0.0.1:{os.environ.get('HEALTHCHECK_PORT') or port_of(started_with()) or '50050'}"
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="liveness"), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"{address}: {error}", file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def started_with() -> list[str]:
    """The words of the command that the container runs."""
    with open("/proc/1/cmdline", encoding="utf-8") as file:  # noqa: PTH123 - read once, by a process that lives a moment
        return file.read().split("\0")


def port_of(words: list[str]) -> str | None:
    """The value of --port among a command's words, or the default of the module that it runs."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port":
            return following
        if word.startswith("--port="):
            return word.removeprefix("--port=")
    defaults = {"outrider_target": "50051", "outrider_draft": "50052", "outrider_coordinator": "50050"}
    return next((defaults[word] for word in words if word in defaults), None)


if __name__ == "__main__":
    sys.exit(main())
