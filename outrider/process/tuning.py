"""Switches of a process that answers within a millisecond: gRPC's poller and fork handlers, garbage collection.

Owns process-wide switches that only a process's ``main`` may turn; a library that is imported into somebody else's
process turns none. What each is worth stands in docs/decisions.
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
    """Before the first channel or server of the process is made. What the environment says about it is left alone."""
    os.environ.setdefault(_FORK_SUPPORT, "false")
    if grpc.__version__.startswith(_POLLER_KNOWN_IN):
        os.environ.setdefault(_EXPERIMENTS, _POLLER)


def settle_process() -> None:
    """When all that stays has been made: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
