"""Process-wide switches for low latency: gRPC's poller and fork handlers, garbage collection.

Only the ``main`` of a process uses them, never a library that is imported into another program. docs/decisions has
their effect.
"""

from __future__ import annotations

import gc
import os

import grpc

_EXPERIMENTS = "GRPC_EXPERIMENTS"
_POLLER = "-event_engine_client,-event_engine_listener"
"""A message wakes one thread of gRPC's instead of three."""
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
"""No process of ours forks. With fork handlers 5 coordinators of a fault run ended by SIGSEGV; without, none."""
_POLLER_KNOWN_IN = ("1.84.", "1.85.")
"""Releases of grpcio in which these names mean that; others would only complain of them."""


def prepare_process() -> None:
    """Called before the first channel or server of the process is created. Existing environment variables take
    precedence.
    """
    os.environ.setdefault(_FORK_SUPPORT, "false")
    if grpc.__version__.startswith(_POLLER_KNOWN_IN):
        os.environ.setdefault(_EXPERIMENTS, _POLLER)


def settle_process() -> None:
    """Called when all permanent objects exist, which the garbage collector then no longer scans."""
    gc.collect()
    gc.freeze()
