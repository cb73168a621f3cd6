"""Faults done to real processes, drawn from a printed seed: every stream is compared with its undisturbed twin."""

import os

# With it gRPC's handlers run in every child that is forked while calls run; some children ended by SIGSEGV before they
# became a service.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
