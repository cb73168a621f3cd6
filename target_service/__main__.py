"""``python -m target_service``: serve a large model over gRPC.

Owns the order in which a target's process comes up and the settings it takes (``--help``). The port is bound before
torch is imported, so that what is wrong with it is said at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config import TargetSettings, load
from outrider.engine.folders import require_model_folder
from outrider.ports import TargetCommand, TargetEvent
from outrider.telemetry import exit_cleanly, set_up_logging
from outrider.telemetry.progress import ByteProgress
from outrider.transport.hosting import OnFailure, PendingService, Progress, host_service, run
from outrider.transport.server import Server, serve_target

if TYPE_CHECKING:
    from target_service.service import TargetService


async def serve(settings: TargetSettings) -> None:
    """Serve until a signal; raises what kept the service from starting or made it fail."""
    require_model_folder(settings.model)

    async def listen(pending: PendingService[TargetCommand, TargetEvent]) -> Server:
        return await serve_target(pending, host=settings.host, port=settings.port)

    def load_model(progress: Progress, on_failure: OnFailure) -> TargetService:
        from target_service.service import TargetService

        return TargetService.load(settings, progress=progress, on_failure=on_failure)

    await host_service(
        listen,
        load_model,
        progress=ByteProgress("loading the target"),
        drain_delay_s=settings.drain_delay_s,
        drain_grace_s=settings.drain_grace_s,
    )


def main() -> None:
    """Read the settings and serve."""
    with exit_cleanly():
        settings = load(TargetSettings)
        set_up_logging(settings.log_level, service="target")
        run(serve(settings))


if __name__ == "__main__":
    main()
