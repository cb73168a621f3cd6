"""Process-wide switches for low latency: gRPC's poller and fork handlers, garbage collection.

Only the ``main`` of a process uses them, never a library that is imported into another program. docs/decisions has
their effect. Imports no gRPC, which reads its environment when it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from importlib import metadata

_VERBOSITY = "GRPC_VERBOSITY"
"""gRPC's own log lines are no JSON, and failed calls raise errors with the same information."""
_EXPERIMENTS = "GRPC_EXPERIMENTS"
_POLLER = "-event_engine_client,-event_engine_listener"
"""A message wakes one thread of gRPC's instead of three."""
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
"""No process of ours forks. With fork handlers 5 coordinators of a fault run ended by SIGSEGV; without, none."""
_POLLER_KNOWN_IN = ("1.84.", "1.85.")
"""Releases of grpcio in which these names mean that; others would only complain of them."""


def grpc_environment() -> dict[str, str]:
    """The variables to set for gRPC, without those that are set already. A ``__main__`` sets them before it imports
    anything else: they have no effect once gRPC is imported.
    """
    wanted = {_VERBOSITY: "NONE", _FORK_SUPPORT: "false"}
    if _installed_grpc().startswith(_POLLER_KNOWN_IN):
        wanted[_EXPERIMENTS] = _POLLER
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _installed_grpc() -> str:
    """The release; empty where there is none."""
    try:
        return metadata.version("grpcio")
    except metadata.PackageNotFoundError:
        return ""


def freeze_objects() -> None:
    """Called when all permanent objects exist, which the garbage collector then no longer scans."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def permanent_imports() -> Iterator[None]:
    """Context in which modules are imported that stay for good: the garbage collector never scans what they make.

    torch and transformers make 240,000 objects: to scan them again and again while they are made, and before a service
    serves, takes 0.25 s of a processor.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
