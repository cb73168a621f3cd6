"""``python -m draft_service``: serve a small model, or prompt lookup, over gRPC.

Owns the order in which a draft's process comes up and the settings it takes (``--help``). The port is bound before
torch is imported, so that what is wrong with it is said at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draft_service.settings import check_settings
from outrider.config import DraftSettings, load
from outrider.ports import DraftCommand, DraftEvent
from outrider.telemetry import exit_cleanly, set_up_logging
from outrider.telemetry.progress import ByteProgress
from outrider.transport.hosting import OnFailure, PendingService, Progress, host_service, run
from outrider.transport.server import Server, serve_draft

if TYPE_CHECKING:
    from draft_service.service import DraftService


async def serve(settings: DraftSettings) -> None:
    """Serve until a signal; raises what kept the service from starting or made it fail."""
    check_settings(settings)

    async def listen(pending: PendingService[DraftCommand, DraftEvent]) -> Server:
        return await serve_draft(pending, host=settings.host, port=settings.port)

    def load_model(progress: Progress, on_failure: OnFailure) -> DraftService:
        from draft_service.service import DraftService

        return DraftService.load(settings, progress=progress, on_failure=on_failure)

    await host_service(
        listen,
        load_model,
        progress=ByteProgress("loading the draft"),
        drain_delay_s=settings.drain_delay_s,
        drain_grace_s=settings.drain_grace_s,
    )


def main() -> None:
    """Read the settings and serve."""
    with exit_cleanly():
        settings = load(DraftSettings)
        set_up_logging(settings.log_level, service="draft")
        run(serve(settings))


if __name__ == "__main__":
    main()
