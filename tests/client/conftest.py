"""A public service with a scripted generator, on an event loop of its own so that blocking clients can be tested."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from outrider.cli.stack.held_ports import HeldPort
from outrider.transport.security import OPEN_SERVER, ServerSecurity
from outrider.transport.server import Server, serve_generation
from tests.support.scripted_generator import ScriptedGenerator

ResultT = TypeVar("ResultT")


class Service:
    """Serves until stopped."""

    def __init__(self, security: ServerSecurity = OPEN_SERVER) -> None:
        self.generator = ScriptedGenerator()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._port = HeldPort()
        serving = serve_generation(self.generator, host="127.0.0.1", port=self._port.number, security=security)
        self._server: Server = self.run(serving)
        self.address = self._server.address

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=300)

    def until(self, **counts: int) -> None:
        """Wait until the generator's counts are at least so high."""
        self.run(self.generator.until(**counts))

    def until_asked(self, count: int = 1) -> None:
        """Wait until so many generations were asked for."""
        self.until(num_asked=count)

    def stop(self) -> None:
        self.run(self._server.stop())

    def shut_down(self) -> None:
        """Shut down as a process that drains and has no patience: running calls are cancelled."""
        self.run(self._server.drain(delay_s=0, grace_s=0.01))

    def start_again(self) -> None:
        """Start again at the same address."""
        self._server = self.run(serve_generation(self.generator, host="127.0.0.1", port=self._port.number))

    def close(self) -> None:
        self.stop()
        self._port.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def services() -> Iterator[tuple[Service, Service]]:
    """Two of one model."""
    both = Service(), Service()
    yield both
    for service in both:
        service.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()
