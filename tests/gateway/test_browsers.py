"""Pages in browsers (CORS), and a path before all endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from outrider.config import GatewaySettings
from outrider.gateway.app import make_app
from outrider.gateway.endpoints import Endpoints

ORIGIN = "https://a.example"


def app(**settings: object) -> Starlette:
    return make_app(Endpoints(None, None), settings=GatewaySettings(**settings))  # type: ignore[arg-type]


async def ask(served: Starlette, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer."""
    started: dict[str, Any] = {}
    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": names}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)

    await served(scope, receive, send)
    return started["status"], {name.decode(): value.decode() for name, value in started["headers"]}


@pytest.mark.parametrize(("origins", "allowed"), [(f"{ORIGIN}, https://b.example", ORIGIN), ("*", "*"), (None, None)])
async def test_pages_of_named_origins_may_call(origins: str | None, allowed: str | None) -> None:
    status, headers = await ask(app(allowed_origins=origins), "GET", "/version", origin=ORIGIN)
    assert (status, headers.get("access-control-allow-origin")) == (200, allowed)


async def test_pages_of_other_origins_may_not() -> None:
    _, headers = await ask(app(allowed_origins=ORIGIN), "GET", "/version", origin="https://c.example")
    assert "access-control-allow-origin" not in headers


async def test_a_browser_asks_beforehand_without_a_key() -> None:
    status, headers = await ask(
        app(allowed_origins=ORIGIN, allow_credentials=True),
        *("OPTIONS", "/v1/chat/completions"),
        origin=ORIGIN,
        access_control_request_method="POST",
        access_control_request_headers="authorization",
    )
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert headers["access-control-allow-headers"] == "authorization"
    assert headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(("path", "status"), [("/api/version", 200), ("/version", 200), ("/apiversion", 404)])
async def test_endpoints_are_served_with_and_without_the_root_path(path: str, status: int) -> None:
    assert (await ask(app(root_path="/api/"), "GET", path))[0] == status
