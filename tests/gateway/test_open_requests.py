"""Requests that a gateway reads: their bytes in all, and what is held of them while they are answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.conftest import Service
from tests.gateway.conftest import Gateway, wait_until
from tests.gateway.test_http import JSON, MESSAGES, ask

LARGE = 1_900_000
_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


@pytest.fixture
def small_gateway(service: Service) -> Iterator[Gateway]:
    gateway = Gateway(service.address, max_open_request_bytes=200_000)
    yield gateway
    gateway.close()


def address_of(gateway: Gateway) -> tuple[str, int]:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def asked(gateway: Gateway, num_characters: int) -> Any:
    documents = [{"text": "x" * num_characters}]
    return ask(gateway, "/v1/chat/completions", {"messages": MESSAGES, "documents": documents, "max_tokens": 4})


def test_more_bytes_than_may_be_read_are_refused_and_small_requests_are_not(small_gateway: Gateway) -> None:
    assert asked(small_gateway, 150_000).status == 200  # alone
    with socket.create_connection(address_of(small_gateway)) as half:
        half.sendall(_HEAD.format(150_000).encode() + b" " * 140_000)
        deadline = time.monotonic() + 240
        while (refused := asked(small_gateway, 100_000)).status == 200:
            assert time.monotonic() < deadline
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json["error"]["type"] == "RateLimitError"
        assert "max_open_request_bytes" in refused.json["error"]["message"]
        assert asked(small_gateway, 1000).status == 200
    deadline = time.monotonic() + 240
    while asked(small_gateway, 150_000).status != 200:
        assert time.monotonic() < deadline


def test_a_client_that_leaves_within_its_body_is_no_error(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(address_of(gateway)) as half:
        half.sendall(_HEAD.format(50_000).encode() + b" " * 100)
        assert asked(gateway, 10).status == 200  # by now the other one is read
    assert asked(gateway, 10).status == 200
    wait_until(lambda: not gateway.open_requests.num_bytes, "the end of all")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_ids_of_prompts_count_while_they_are_answered(service: Service, small_gateway: Gateway) -> None:
    service.generator.stop_after = 1
    connection = http.client.HTTPConnection(*address_of(small_gateway), timeout=120)
    body = {"prompt": [[5] * 500] * 90, "max_tokens": 4, "stream": True}  # 2 bytes an id in JSON
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), JSON)
        assert connection.getresponse().status == 200
        assert asked(small_gateway, 60_000).status == 429
        service.generator.stop_after = None
        assert asked(small_gateway, 20_000).status == 200


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "documents": [{"text": "x" * LARGE}]}),
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": "a", "hidden": "x" * LARGE}]}),
        ("/v1/completions", {"prompt": "x" * LARGE, "truncate_prompt_tokens": 3}),
    ],
)
def test_nothing_is_held_of_what_its_prompt_was_made_of(
    service: Service, gateway: Gateway, path: str, given: dict[str, Any], streams: bool
) -> None:
    service.generator.stop_after = 1
    content = json.dumps({**given, "max_tokens": 4, "stream": streams}).encode()
    assert ask(gateway, "/tokenize", {"prompt": "a"}).status == 200
    connection = http.client.HTTPConnection(*address_of(gateway), timeout=120)
    with contextlib.closing(connection):
        tracemalloc.start(1)
        try:
            connection.request("POST", path, content, JSON)
            service.until_asked()
            deadline = time.monotonic() + 240  # the thread that made the prompt may be the last to let go
            while tracemalloc.get_traced_memory()[0] > LARGE / 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            tracemalloc.stop()
