"""``python -m outrider.gateway``: serve the OpenAI API over HTTP for coordinators at given addresses."""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment

os.environ.update(grpc_environment())  # before gRPC is imported

if __name__ == "__main__":
    from outrider.process.extras import exit_without_extras

    exit_without_extras(["gateway"], "the gateway service")

from outrider.config import GatewaySettings
from outrider.process.hosting import run_process


def main() -> None:
    """Serve until a signal."""

    async def run(settings: GatewaySettings) -> None:
        # Late, so that settings that are wrong are told without it.
        from outrider.gateway.server import serve

        await serve(settings)

    run_process(GatewaySettings, run)


if __name__ == "__main__":
    main()
