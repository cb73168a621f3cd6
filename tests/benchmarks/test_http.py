"""Servers over HTTP: a scripted one, whose every byte is known, and our gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.benchmarks.http.run import HttpPlan, ServerUnderTest, client_processes, run_plan, to_row
from outrider.benchmarks.http.streams import TimedStream, stream_completion
from outrider.benchmarks.peers.run import Load
from outrider.cli.bench import app
from outrider.errors import UnavailableError
from tests.gateway.conftest import gateway, service

__all__ = ["gateway", "service"]

LOADS = (Load(1, (((3, 1),), ((4, 1),))), Load(3, (((5, 9), (2, 6), (5, 3)),)))


class ScriptedServer:
    """Counts the prompt's last token up; an event may be cut anywhere, as a proxy would."""

    def __init__(
        self, *, cut: int = 10**6, fail_after: int = 10**6, chunked: bool = True, lingers: bool = False
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._cut, self._fail_after, self._chunked, self._lingers = cut, fail_after, chunked, lingers
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.run_until_complete(self._server.wait_closed())
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.paths.append(head.split()[1])
        if len(self.bodies) > self._fail_after:
            length_told = "Content-Length: 12\r\n" if self._lingers else ""
            writer.write(f"HTTP/1.1 503 Service Unavailable\r\n{length_told}\r\nno room left".encode())
        else:
            self._write_stream(writer, self.bodies[-1])
        await writer.drain()
        if self._lingers:
            await reader.read()  # until the client closes
        writer.close()

    def _write_stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        encoding = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{encoding}\r\n".encode())
        ids = [body["prompt"][-1] + 1 + index for index in range(body["max_tokens"])]
        events: list[dict[str, Any]] = [{"choices": [{"text": f"{one} ", "token_ids": [one]}]} for one in ids]
        events.append({"choices": [], "usage": {"completion_tokens": len(ids)}})
        content = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"
        for start in range(0, len(content), self._cut):
            part = content[start : start + self._cut]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        if self._chunked:
            writer.write(b"0\r\n\r\n")


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    server = ScriptedServer(**getattr(request, "param", {}))
    yield server
    server.close()


@pytest.mark.parametrize("scripted", [{}, {"cut": 7}, {"cut": 7, "chunked": False}], indirect=True)
async def test_a_stream_is_read_however_it_is_cut(scripted: ScriptedServer) -> None:
    found = await stream_completion(scripted.url + "/some", {"prompt": [3, 1], "max_tokens": 4, "n": 1})
    assert (found.num_tokens, found.token_ids, found.text) == (4, (2, 3, 4, 5), "2 3 4 5 ")
    assert found.began <= found.first <= found.last
    assert scripted.paths == ["/some/v1/completions"]
    expected = {"prompt": [3, 1], "max_tokens": 4, "n": 1}
    assert scripted.bodies == [{**expected, "stream": True, "stream_options": {"include_usage": True}}]


@pytest.mark.parametrize("scripted", [{"fail_after": 0}, {"fail_after": 0, "lingers": True}], indirect=True)
async def test_an_error_of_the_server_is_told_in_its_words(scripted: ScriptedServer) -> None:
    with pytest.raises(UnavailableError, match="status 503: no room left"):
        await stream_completion(scripted.url, {"prompt": [1], "max_tokens": 2})


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await stream_completion("http://127.0.0.1:1", {"prompt": [1], "max_tokens": 2})


HEAD, CHUNKED = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = 'data: {"choices": [{"text": "é€"}], "error": null}\n\n'.encode()
USAGE = b'data: {"choices": null, "usage": {"completion_tokens": 1}}\n\n'


async def stream_of(answer: bytes) -> TimedStream:
    """Stream of a server that answers with these bytes and closes the connection."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await stream_completion(f"http://127.0.0.1:{port}", {"prompt": [1], "max_tokens": 1})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD + EVENT + EVENT[:20], "sent an event that is none of a completion"),
        (HEAD + EVENT.replace("é".encode(), b"\xff") + USAGE, "none of a completion"),
        (HEAD + b"data: 3\n\n", "none of a completion: 3"),
        (HEAD + b'data: {"usage": {"tokens": 1}}\n\n', "none of a completion"),
        (HEAD + EVENT, "ended after 1 events without its usage"),
        (HEAD + EVENT + b'data: {"error": {"message": "no room"}}\n\n', "no room"),
        (CHUNKED, "closed the connection in the middle"),
        (CHUNKED + b"%x\r\n%b" % (len(EVENT), EVENT[:9]), "closed the connection in the middle"),
        (b"\r\n\r\n", "no status line of HTTP"),
        (b"SSH-2.0 some\r\n\r\n", "'SSH-2.0 some' is no status line of HTTP"),
        (HEAD[:17] + b"X: " + b"x" * 100_000 + HEAD, "limit"),
    ],
)
async def test_an_answer_that_is_no_stream_of_a_completion_is_one_error(answer: bytes, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        await stream_of(answer)


async def test_lines_may_end_as_those_of_http_and_fields_may_be_null() -> None:
    found = await stream_of(HEAD + b": comment\r\n" + (EVENT + USAGE).replace(b"\n", b"\r\n"))
    assert (found.num_tokens, found.text) == (1, "é€")


def test_servers_take_turns_with_the_same_prompts_and_no_cached_ones(scripted: ScriptedServer) -> None:
    servers = (ServerUnderTest("a", scripted.url), ServerUnderTest("b", scripted.url, {"temperature": 0.5}))
    with client_processes(2, 240.0) as send:
        outcomes = run_plan(HttpPlan(servers, LOADS, num_tokens=4, num_warmups=0), send)
    assert [(one.engine, one.num_users, len(one.first_ms)) for one in outcomes] == [
        ("a", 1, 2),
        ("b", 1, 2),
        ("a", 3, 1),
        ("b", 3, 1),
    ]
    assert outcomes[0].tokens == ((2, 3, 4, 5), (2, 3, 4, 5))
    assert [to_row(one, outcomes)[-1] for one in outcomes] == ["2/2", "2/2", "3/3", "3/3"]
    assert all(min(one.first_ms + one.all_ms) > 0 for one in outcomes)
    sent = [(body["prompt"], body["max_tokens"], body["temperature"]) for body in scripted.bodies[:8]]
    assert sent == [([first, 1], count, warmth) for first in (3, 4) for warmth in (0, 0.5) for count in (1, 4)]
    assert len({body["cache_salt"] for body in scripted.bodies}) == 2 * 2 * 3, "one a call"


@pytest.mark.parametrize("scripted", [{"fail_after": 4}], indirect=True)
def test_a_server_that_fails_leaves_the_others(scripted: ScriptedServer) -> None:
    failed: list[tuple[str, int]] = []
    plan = HttpPlan(
        (ServerUnderTest("a", "http://127.0.0.1:1"), ServerUnderTest("b", scripted.url)), LOADS, 4, num_warmups=0
    )
    with client_processes(1, 240.0) as send:
        outcomes = run_plan(plan, send, on_failed=lambda name, users, error: failed.append((name, users)))
    assert failed == [("a", 1), ("b", 3)]
    assert [(one.engine, one.num_users) for one in outcomes] == [("b", 1)]


def test_the_command_measures_our_gateway(gateway: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    arms = [f"ours={gateway.url}/v1", f"alone={gateway.url}", "--request", 'alone={"num_speculative_tokens": 0}']
    sizes = ["--input-len", "6", "--output-len", "3", "--max-concurrency", "2", "--runs", "1", "--vocab-size", "90"]
    result = CliRunner().invoke(app, ["http", *arms, *sizes, "--last-token", "7", "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert [(row["engine"], row["num_users"], row["prompts_as_the_first"]) for row in found["rows"]] == [
        ("ours", 2, "2/2"),
        ("alone", 2, "2/2"),
    ]
    assert found["servers"][1]["body"] == {"num_speculative_tokens": 0}
    assert (found["input_lens"], found["output_len"]) == ([6], 3)
    assert "after the" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:8000"], "'127.0.0.1:8000' should be NAME=URL"),
        (["a=127.0.0.1:8000"], "should be an address such as http"),
        (["a=http://[::1"], "should be an address such as http"),
        (["a=http://127.0.0.1:80000"], "should be an address such as http"),
        (["a=http://127.0.0.1:1", "a=http://127.0.0.1:2"], "names should differ, and are a, a"),
        (["a=http://127.0.0.1:1", "--json", "/"], "/ is a folder, and should be a file"),
        (["a=http://127.0.0.1:1", "--request", "b={}"], "'b' is none of a"),
        (["a=http://127.0.0.1:1", "--request", "a=[]"], "should be a JSON object"),
        (["a=http://127.0.0.1:1", "--json", "nowhere/some.json"], "nowhere is not a folder"),
    ],
)
def test_nonsense_is_one_clear_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["http", *arguments])
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
