"""docs/http.md against the code: every field is in its table."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.gateway.app import make_app
from outrider.gateway.endpoints import Endpoints
from outrider.gateway.protocol import ChatCompletionRequest, CompletionRequest
from outrider.gateway.protocol.unsupported import REFUSED
from outrider.gateway.responses.error_responses import _STATUSES

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
TABLE = PAGE[PAGE.index("| field | completions") :]


def rows() -> dict[str, str]:
    """Field -> its row."""
    return {
        name: line
        for line in TABLE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def test_every_field_that_is_understood_is_documented_as_such() -> None:
    for fields, column in ((CompletionRequest.model_fields, 2), (ChatCompletionRequest.model_fields, 3)):
        for name in fields:
            said = rows()[name].split("|")[column].strip()
            assert said and said not in ("refused", "ignored"), name


def test_every_field_that_is_refused_is_documented_as_such() -> None:
    for name, (harmless, _) in REFUSED.items():
        assert "refused" in rows()[name] or any(str(value).lower() in rows()[name] for value in harmless), name


def test_every_endpoint_and_status_is_documented() -> None:
    app = make_app(Endpoints(None, None))  # type: ignore[arg-type]
    for route in app.routes:
        path = str(getattr(route, "path", "")).replace("{name:path}", "NAME")
        assert path in PAGE
    for status in _STATUSES.values():
        assert f"| {int(status)}" in PAGE, status
