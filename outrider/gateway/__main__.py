"""``python -m outrider.gateway``: serve the OpenAI API over HTTP for coordinators at given addresses."""

from __future__ import annotations

import os
import sys

# gRPC reads it when it is imported. Its own lines are no JSON, and what they tell the log tells too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if __name__ == "__main__":
    from outrider.process.extras import exit_without_extras

    exit_without_extras(["gateway"], "the gateway service")

from collections.abc import Sequence

from outrider.config import GatewaySettings
from outrider.process.hosting import run_process


def main() -> None:
    """Serve until a signal."""

    async def run(settings: GatewaySettings) -> None:
        # Late, so that settings that are wrong are told without it.
        from outrider.gateway.server import serve

        await serve(settings)

    sys.argv[1:] = with_addresses(sys.argv[1:])
    run_process(GatewaySettings, run)


_SAME = {"--http-port": "--port", "--http-host": "--host"}
"""Flags as ``outrider serve`` has them."""


def with_addresses(argv: Sequence[str]) -> list[str]:
    """The flags with ``--coordinator ADDRESS...`` as a setting, and flags of ``outrider serve`` translated."""
    found, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag != "--coordinator":
            found.append(_SAME.get(flag, flag) + equals + value)
            continue
        addresses = [value] if equals else []
        while rest and not rest[0].startswith("--"):
            addresses.append(rest.pop(0))
        found += ["--coordinator-address", ",".join(addresses)]
    return found


if __name__ == "__main__":
    main()
