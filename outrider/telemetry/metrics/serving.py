"""Metrics of one process, on the port of its settings; without a port nothing is imported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, TargetSettings
from outrider.errors import ConfigError, install_command
from outrider.readings import Reading

_log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
"""Longest wait of a scrape for the event loop."""

Read = Callable[[], Iterable[Reading]]

_ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def metrics_served(
    settings: TargetSettings | DraftSettings | CoordinatorSettings | GatewaySettings, read: Read
) -> Iterator[None]:
    """Serve the readings of ``read``, if the settings have a port; it is called in another thread."""
    if settings.metrics_port is None:
        yield
        return
    try:
        from outrider.telemetry.metrics.endpoint import MetricsEndpoint
    except ImportError as error:
        raise ConfigError(
            "metrics_port",
            f"needs prometheus-client and uvicorn, {error.name} is not installed: {install_command('telemetry')}",
        ) from error
    plain_host = "127.0.0.1" if settings.host.startswith("unix:") else settings.host
    endpoint = MetricsEndpoint(
        read,
        role=settings.name,
        host=settings.metrics_host or plain_host,
        port=settings.metrics_port,
        vllm_names=isinstance(settings, TargetSettings | CoordinatorSettings) and settings.vllm_metric_names,
    )
    _log.info("metrics at port %d", endpoint.port)
    try:
        yield
    finally:
        # It waits for the server's thread, which may be waiting for this loop.
        endpoint.close()


def read_on(loop: asyncio.AbstractEventLoop, read: Read) -> Read:
    """Read on the event loop from another thread, and wait for the result."""

    async def read_in_loop() -> list[Reading]:
        return list(read())

    def read_from_other_thread() -> list[Reading]:
        return asyncio.run_coroutine_threadsafe(read_in_loop(), loop).result(SCRAPE_TIMEOUT_S)

    return read_from_other_thread


def build_info(model: str, version: str) -> Reading:
    """Reading of the build information metric."""
    labels = (("version", version), ("commit", _commit()), ("model", model))
    return Reading("outrider_build_info", 1, labels)


def _commit() -> str:
    """``GIT_COMMIT`` of the environment, else the checkout's commit; empty when neither is there."""
    return os.environ.get("GIT_COMMIT", "") or _of_checkout(_ROOT / ".git")


def _of_checkout(git: Path) -> str:
    try:
        if git.is_file():  # a linked worktree
            git = Path(git.read_text(encoding="ascii").removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref:"):
            return head
        shared = git / "commondir"
        common = git / shared.read_text(encoding="ascii").strip() if shared.is_file() else git
        return (common / head.removeprefix("ref:").strip()).read_text(encoding="ascii").strip()
    except OSError:
        return ""
