"""A service without a model, for the supervisor's tests: standard health on a port, and faults on request.

python -m tests.cli.fake_service --port N [--fail TEXT] [--log FILE] [--name NAME] [--chatter LINES]
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fail")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--chatter", type=int, default=0, help="warnings to log as soon as it serves")
    options = parser.parse_args()
    if options.fail:
        sys.stderr.write(f"error: {options.fail}\n")
        sys.exit(1)
    # A limit on the size of files that the parent was given is not meant for the notes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Waited for rather than handled: a handler that sets an event may find its lock held by the wait it interrupts.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    note(options.log, f"{options.name} up")
    chat(options.chatter)
    if options.chatter:
        note(options.log, f"{options.name} has chattered")
    signal.sigwait({signal.SIGTERM})
    if options.ignore_sigterm:
        threading.Event().wait()
    server.stop(0).wait()
    note(options.log, f"{options.name} down")


def chat(num_lines: int) -> None:
    line = json.dumps({"level": "warning", "message": "chatter " * 100})
    for _ in range(num_lines):
        sys.stderr.write(line + "\n")
    sys.stderr.flush()


def note(path: Path | None, line: str) -> None:
    if path is not None:
        with path.open("a") as log:
            log.write(line + "\n")


if __name__ == "__main__":
    main()
