"""A gateway over real HTTP, in front of the public service with a scripted generator over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from outrider import AsyncClient
from outrider.gateway.app import make_app
from outrider.gateway.endpoints import Endpoints, GatewayLimits
from outrider.gateway.served_model import ModelWatch
from outrider.gateway.server import bounded_socket
from outrider.gateway.timed_protocol import TimedProtocol
from outrider.gateway.watching import HttpWatch
from outrider.tokenization import ModelText
from outrider.tokenization.model_text import read_text_files
from outrider.transport.security import TokenFile
from tests.client.conftest import Service

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair" / "target"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FILES = {**read_text_files(PAIR), "chat_template.jinja": TEMPLATE.encode()}
TEXT = ModelText.from_files(FILES, bos_token_id=0)


class Gateway:
    """Serves over HTTP on a thread of its own until closed."""

    def __init__(
        self,
        *addresses: str,
        names: tuple[str, ...] = (),
        tokens: TokenFile | None = None,
        token: Any = None,
        watch: HttpWatch | None = None,
        metrics: Any = tuple,
        **limits: Any,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(list(addresses), token=token)
        endpoints = Endpoints(self._client, ModelWatch(self._client, names=names), GatewayLimits(**limits))
        self.open_requests = endpoints.open_requests
        listener = bounded_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(endpoints, tokens=tokens, watch=watch, metrics=metrics),
                http=TimedProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
            )
        )
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        async def serve() -> None:
            async with self._client:
                await self._server.serve(sockets=[listener])

        self._loop.run_until_complete(serve())

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._loop.close()


def wait_until(condition: Any, what: str) -> None:
    """Return as soon as the condition holds; an error that names it when the deadline is past."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, f"did not come about: {what}"
        time.sleep(0.005)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    service.generator.tokenizer = TEXT.files
    yield service
    service.close()


@pytest.fixture
def gateway(service: Service) -> Iterator[Gateway]:
    gateway = Gateway(service.address)
    yield gateway
    gateway.close()
