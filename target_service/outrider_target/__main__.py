"""``outrider target``: serve a large model over gRPC.

Owns the order in which a target's process comes up and the settings it takes (``--help``). The port is bound before
torch is imported, so that what is wrong with it is said at once.
"""

from __future__ import annotations

import os

from outrider.process.tuning import grpc_environment, permanent_imports

os.environ.update(grpc_environment())  # before gRPC is imported

if __name__ == "__main__":
    from outrider.process.extras import exit_without_extras

    exit_without_extras(["engine"], "the target service")

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING

from outrider.config import TargetSettings
from outrider.model_executor.distributed.rank_info import follow
from outrider.ports import TargetCommand, TargetEvent
from outrider.process.head_layers import with_layers_of_folder
from outrider.process.hosting import OnFailure, PendingService, host_service, run_process
from outrider.process.loading import LoadProgress
from outrider.process.model_files import is_hub_id, require_model_folder, with_local_model
from outrider.transport.http_health import Probes
from outrider.transport.security import service_security
from outrider.transport.server import Server, serve_target

if TYPE_CHECKING:
    from outrider_target.service import TargetService


async def serve(settings: TargetSettings) -> None:
    """Serve until a signal; raises what kept the service from starting or made it fail."""
    if not is_hub_id(settings.model):
        require_model_folder(settings.model)

    def listen(pending: PendingService[TargetCommand, TargetEvent]) -> Awaitable[Server]:
        return serve_target(
            pending,
            host=settings.host,
            port=settings.port,
            security=service_security(settings),
            probes=Probes.of(settings),
            link_timeout_s=settings.link_timeout_ms / 1000,
            admit_channel=pending.admit_channel,
        )

    await host_service(listen, partial(load_model, settings), settings)


def load_model(settings: TargetSettings, progress: LoadProgress, on_failure: OnFailure) -> TargetService:
    """The service that the settings ask for, its model downloaded where need be; imports torch."""
    with permanent_imports():
        from outrider_target.service import TargetService

    found = _with_files(settings)
    progress.on_files()
    return TargetService.load(
        found, progress=progress.weights, capture_progress=progress.captures, on_failure=on_failure
    )


def _with_files(settings: TargetSettings) -> TargetSettings:
    """The settings with what files say: of the model, which is downloaded where need be, and of a draft's head."""
    return with_layers_of_folder(with_local_model(settings, reads_configuration=True))


if __name__ == "__main__":
    run_process(TargetSettings, serve, partial(follow, prepare=_with_files))
