"""``outrider draft``: serve a small model, or prompt lookup, over gRPC.

Owns the order in which a draft's process comes up and the settings it takes (``--help``). The port is bound before
torch is imported, so that what is wrong with it is said at once.
"""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment, permanent_imports

os.environ.update(grpc_environment())  # before gRPC is imported

if __name__ == "__main__":
    from outrider.process.extras import exit_without_extras

    exit_without_extras(["engine"], "the draft service")

from functools import partial
from typing import TYPE_CHECKING

from outrider.config import DraftSettings
from outrider.model_executor.distributed.rank_info import follow
from outrider.process.hosting import OnFailure, host_service, run_process
from outrider.process.loading import LoadProgress
from outrider.process.model_files import with_local_model
from outrider.transport.http_health import Probes
from outrider.transport.security import service_security
from outrider.transport.server import serve_draft
from outrider_draft.proposers.registry import check_settings

if TYPE_CHECKING:
    from outrider_draft.service import DraftService


async def serve(settings: DraftSettings) -> None:
    """Serve until a signal; raises the error that prevented the start or ended the service."""
    check_settings(settings)
    listen = partial(
        serve_draft,
        host=settings.host,
        port=settings.port,
        security=service_security(settings),
        probes=Probes.of(settings),
        link_timeout_s=settings.link_timeout_ms / 1000,
    )
    await host_service(listen, partial(load_model, settings), settings)


def load_model(settings: DraftSettings, progress: LoadProgress, on_failure: OnFailure) -> DraftService:
    """Load the configured service, downloading its model if needed; imports torch."""
    with permanent_imports():
        from outrider_draft.service import DraftService

    found = with_local_model(settings)
    check_settings(found)  # the folder may have named another method
    progress.on_files()
    return DraftService.load(
        found, progress=progress.weights, capture_progress=progress.captures, on_failure=on_failure
    )


if __name__ == "__main__":
    run_process(DraftSettings, serve, partial(follow, prepare=with_local_model))
