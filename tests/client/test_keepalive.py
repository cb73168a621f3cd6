"""A coordinator that is gone without a word, and one that has nothing to say for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from outrider import Client
from outrider.errors import DeadlineError, UnavailableError
from outrider.transport.channels import CLIENT_OPTIONS, keepalive
from tests.client.conftest import Service
from tests.faults.proxy import Impairment, Proxy

BLACK_HOLE = Impairment(is_black_hole=True)
_USED = "outrider.transport.remote_generation.CLIENT_OPTIONS"


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    proxy = Proxy(service.address)
    service.run(proxy.start())
    yield proxy
    service.run(proxy.close())


def seconds_to_notice(service: Service, proxy: Proxy) -> float:
    """Seconds from the moment at which every packet vanishes to the error of a stream that awaits output."""
    service.generator.stop_after = 1
    with Client(proxy.address) as client:
        stream = client.stream(prompt="x", max_tokens=4)
        assert next(stream).token_ids == (0,)
        proxy.impair(BLACK_HOLE)
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            next(stream)
        return time.monotonic() - began


def test_a_coordinator_that_is_gone_without_a_word_is_noticed(
    service: Service, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_USED, keepalive(200, 3_000))
    assert seconds_to_notice(service, proxy) < 60


@pytest.mark.slow
def test_it_is_noticed_in_ten_seconds(service: Service, proxy: Proxy) -> None:
    assert seconds_to_notice(service, proxy) < 60


def test_ten_seconds_are_what_the_settings_say() -> None:
    options = dict(CLIENT_OPTIONS)
    assert options["grpc.keepalive_time_ms"] == options["grpc.keepalive_timeout_ms"] == 5_000


def test_a_server_puts_up_with_many_pings_on_a_silent_stream(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own default is to end the connection at the third ping of five minutes."""
    monkeypatch.setattr(_USED, keepalive(20, 5_000))
    service.generator.stop_after = 1
    with Client(service.address) as client, pytest.raises(DeadlineError):
        list(client.stream(prompt="x", max_tokens=2, timeout=1.5))  # some 70 pings
