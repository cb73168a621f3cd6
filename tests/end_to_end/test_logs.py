"""Every line of the log about a request bears its id and its trace's, in whichever service it is written."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.errors import InvalidRequestError, NonFiniteLogitsError
from outrider.telemetry.logs import JsonFormatter
from tests.end_to_end.faults import lose_sessions, outage, poisoned
from tests.end_to_end.waiting import Reader
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

MODEL = cached_tiny_model("qwen3", seed=1, max_position_embeddings=1024)
TRACE = "0af7651916cd43dd8448eb211c80319c"
ASKED: dict[str, Any] = {
    "prompt_token_ids": [99, 2, 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True,
    "request_id": "mine", "trace_parent": f"00-{TRACE}-b7ad6b7169203331-00",
}  # fmt: skip
Entries = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def said() -> Iterator[Entries]:
    """The JSON lines so far whose message contains a text."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(JsonFormatter("all of them"))
    root.addHandler(handler)
    root.setLevel("DEBUG")
    yield lambda text: [
        entry for line in stream.getvalue().splitlines() if text in (entry := json.loads(line))["message"]
    ]
    root.removeHandler(handler)
    root.setLevel(level)


def check_named(entry: dict[str, Any]) -> None:
    assert (entry["request_id"], entry["trace_id"]) == ("mine", TRACE)


async def test_how_a_request_ended_is_said_once(said: Entries) -> None:
    async with run_stack(MODEL, MODEL, wire=True) as stack:
        await stack.generate(**ASKED)
        await stack.generate(prompt_token_ids=[1], max_tokens=1, temperature=0)
    entry, other = said("the request ended: length")
    check_named(entry)
    assert (entry["prompt_tokens"], entry["completion_tokens"], entry["acceptance_rate"]) == (3, 40, 1.0)
    assert 0 <= entry["queue_ms"] <= entry["first_token_ms"] <= entry["total_ms"]
    assert other["request_id"]
    assert "trace_id" not in other


async def test_a_refusal_is_said_to_those_who_listen(said: Entries) -> None:
    async with run_stack(MODEL, wire=True) as stack:
        with pytest.raises(InvalidRequestError):
            await stack.generate(**{**ASKED, "prompt_token_ids": [1_000_000]})
    (entry,) = said("the request is refused")
    check_named(entry)
    assert (entry["level"], entry["error"]) == ("debug", "InvalidRequestError")


async def test_a_failure_is_said_by_the_service_and_by_the_coordinator(said: Entries) -> None:
    async with run_stack(MODEL, wire=True) as stack:
        with poisoned(stack.target.runner, 99, at_length=12), pytest.raises(NonFiniteLogitsError):
            await stack.generate(**ASKED)
    mine, its = said("the session failed on the target: NonFiniteLogitsError"), said("a session failed")
    (ended,) = said("the request failed")
    for entry in (*mine, *its, ended):
        check_named(entry)
    assert [entry["logger"] for entry in (*mine, *its)] == [
        "outrider_coordinator.requests.request_log",
        "outrider.serving.output_processor",
    ]
    assert ended["error"] == "NonFiniteLogitsError"


async def test_a_draft_that_fails_or_forgets_is_said_though_no_user_sees_it(said: Entries) -> None:
    async with run_stack(MODEL, MODEL, wire=True, draft_timeout_ms=60_000) as stack:
        lose_sessions(stack.draft, at_item=6)
        await stack.generate(**ASKED)
        with poisoned(stack.draft.runner, 99, at_length=20):  # type: ignore[union-attr]
            await stack.generate(**ASKED)
    (lost,) = said("the draft lost the session")
    (failed,) = said("the session failed on the draft: NonFiniteLogitsError")
    (its,) = said("a session failed: NonFiniteLogitsError")
    for entry in (lost, failed, its):
        check_named(entry)
        assert entry["level"] == "warning"


async def test_a_service_that_knows_the_session_no_more_says_whose_trace_it_was(said: Entries) -> None:
    async with run_stack(MODEL, MODEL, wire=True, draft_timeout_ms=60_000) as stack:
        lose_sessions(stack.draft, at_item=6)
        await stack.generate(**{**ASKED, "trace_parent": f"00-{TRACE}-b7ad6b7169203331-01"})
    (its,), (lost,) = said("a session is lost"), said("the draft lost the session")
    check_named(lost)
    assert (its["trace_id"], its["session"]) == (TRACE, lost["session"])
    assert "request_id" not in its


async def test_a_target_that_goes_is_said_of_each_of_its_sessions(said: Entries) -> None:
    async with run_stack(MODEL, wire=True) as stack:
        reader = Reader(stack, **{**ASKED, "max_tokens": 400})
        await reader.read(5)
        async with outage(stack, "target"):
            pass
        await reader.finish()
    (gone,) = said("the session's target is lost")
    check_named(gone)
