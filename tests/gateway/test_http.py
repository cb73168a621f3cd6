"""The gateway as plain HTTP: events, headers, vLLM's fields, clients that leave, keys, bounds."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import __version__
from outrider.errors import UnavailableError
from outrider.gateway.generations import MAX_AT_ONCE, GenerationChoice, generate_all, stream_all
from outrider.gateway.middleware import caller_key
from outrider.gateway.protocol.completion import CompletionRequest
from outrider.gateway.protocol.fields import GenerationFields
from outrider.gateway.watching import HttpWatch
from outrider.tokenization import TextTokenizer
from outrider.transport.security import ServerSecurity, TokenFile
from outrider.types import AcceptanceMethod
from tests.client.conftest import Service
from tests.gateway.conftest import TEXT, Gateway, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
assert TEXT.tokenizer is not None
TOKENIZER = TEXT.tokenizer


class Answer:
    """A whole answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, dict(response.getheaders()), response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Events of a stream, read as a client of server-sent events does."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == "" and all(block.startswith("data: ") for block in blocks[:-1])
        assert blocks[-2] == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def ask(gateway: Gateway, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=120)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, JSON if headers is None else headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def complete(gateway: Gateway, **fields: Any) -> Answer:
    return ask(gateway, "/v1/completions", {"prompt": "hello", "max_tokens": 2, **fields})


def chat(gateway: Gateway, **fields: Any) -> Answer:
    return ask(gateway, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **fields})


def test_a_stream_is_framed_as_server_sent_events(gateway: Gateway) -> None:
    answer = complete(gateway, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["usage"]["completion_tokens"] for event in answer.events] == [1, 2, 2, 2]
    assert answer.events[-1]["choices"] == [] and "prompt_tokens_details" in answer.events[-1]["usage"]


def test_every_field_that_is_understood_reaches_the_coordinator(service: Service, gateway: Gateway) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_tokens": 1, "logit_bias": {"5": -150, "6": 1.5},
        "seed": -1, "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "allowed_token_ids": [1, 2], "bad_words": ["x"], "cache_salt": "salt",
        "num_speculative_tokens": 3, "acceptance_method": "coupled", "user": "me", "no_such_field": 1,
        "draft_ahead": False, "priority": -3,
    }  # fmt: skip
    assert complete(gateway, **fields).status == 200
    assert chat(gateway, **fields).status == 200
    for request in service.generator.requests:
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
        assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, -0.5)
        assert dict(sampling.logit_bias) == {5: -100.0, 6: 1.5} and sampling.min_tokens == 1
        assert (request.seed, request.stop, request.stop_token_ids) == ((1 << 64) - 1, ("a", "b"), (9,))
        assert request.ignore_eos and request.include_stop_str_in_output and not request.skip_special_tokens
        assert sampling.allowed_token_ids == (1, 2) and request.bad_words == ("x",)
        assert (request.cache_salt, request.num_speculative_tokens) == ("salt", 3)
        assert request.acceptance_method is AcceptanceMethod.COUPLED and not request.defaulted
        assert not request.draft_ahead and request.priority == -3


def test_null_is_the_same_as_leaving_a_field_out(service: Service, gateway: Gateway) -> None:
    nothing = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert ask(gateway, "/v1/completions", {"prompt": "hello", **nothing}).status == 200
    (request,) = service.generator.requests
    assert request.max_tokens == 16 and request.defaulted and request.skip_special_tokens
    assert GenerationFields.model_fields.keys() <= CompletionRequest.model_fields.keys()


def test_a_chat_without_a_bound_goes_to_the_end_of_the_context(service: Service, gateway: Gateway) -> None:
    service.generator.stop_after = 0
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES, "stream": True}), JSON)
    service.until_asked()
    assert service.generator.requests[0].max_tokens == (1 << 31) - 1
    connection.close()
    service.until(num_abandoned=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("fields", [{"prompt": "hello"}, {"prompt": ["hello", "you"], "n": 2}])
def test_a_client_that_leaves_ends_its_generations(
    service: Service, gateway: Gateway, stream: bool, after: int, fields: dict[str, Any]
) -> None:
    service.generator.stop_after = after
    num_choices = 1 if fields["prompt"] == "hello" else 4
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=120)
    body = json.dumps({**fields, "stream": stream, "max_tokens": 9})
    connection.request("POST", "/v1/completions", body, JSON)
    service.until_asked(num_choices)
    service.until(num_emitted=after * num_choices)
    if stream and after:
        assert connection.getresponse().readline().startswith(b"data: ")
    assert service.generator.num_abandoned == 0
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    service.until(num_abandoned=num_choices)


def test_one_choice_that_fails_ends_the_others(service: Service, gateway: Gateway) -> None:
    generator = service.generator
    generator.stop_after = 3
    for stream in (True, False):
        generator.failures.append((1, UnavailableError("gone")))
        answer = complete(gateway, n=3, max_tokens=9, stream=stream)
        if answer.status == 200:
            assert stream and answer.events[-1]["error"]["message"] == "gone"
        else:
            assert answer.status == 503
        # Nothing is left running: some may not have been begun.
        wait_until(lambda: generator.num_asked == generator.num_finished + generator.num_abandoned, "the end of all")


@pytest.mark.parametrize("prompt", [["a"] * 1000, [[1]] * 9])
def test_the_choices_of_a_request_are_bounded(service: Service, gateway: Gateway, prompt: list[Any]) -> None:
    error = complete(gateway, prompt=prompt, n=128).json["error"]
    assert (error["code"], error["param"]) == (400, "n")
    assert f"which makes {128 * len(prompt)} choices; at most 1024 in one request" in error["message"]
    assert service.generator.num_asked == 0
    assert complete(gateway, prompt=["a"] * 8, n=128, max_tokens=1).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_wait_for_others_have_no_tasks(stream: bool) -> None:
    """The end of a request with a task for each of its choices would take time that is quadratic in their number."""
    num_tasks = len(asyncio.all_tasks())
    num_begun = 0

    class Waiting:
        async def generate(self, **options: Any) -> Any:
            nonlocal num_begun
            num_begun += 1
            await asyncio.Event().wait()

        async def stream(self, **options: Any) -> Any:
            yield await self.generate()

    choices = [GenerationChoice(index, 0, {}) for index in range(4 * MAX_AT_ONCE)]
    client: Any = Waiting()

    async def work() -> None:
        if stream:
            async for _ in stream_all(client, choices):
                pass
        else:
            await generate_all(client, choices)

    working = asyncio.create_task(work())
    while num_begun < MAX_AT_ONCE:
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= num_tasks + MAX_AT_ONCE + 2
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert num_begun == MAX_AT_ONCE and len(asyncio.all_tasks()) == num_tasks


def test_an_interruption_is_gone_on_from_where_it_was(service: Service) -> None:
    gateway = Gateway(service.address, resume_timeout_s=20.0)
    try:
        service.generator.failures.append((1, UnavailableError("restarting")))
        answer = complete(gateway, max_tokens=3, stream=True)
        assert "".join(event["choices"][0]["text"] for event in answer.events) == "<0><1><2>"
        assert len(service.generator.requests) == 2
    finally:
        gateway.close()


def test_an_echo_and_its_logprobs(service: Service, gateway: Gateway) -> None:
    plain = complete(gateway, echo=True)
    assert plain.json["choices"][0]["text"] == "hello<0><1>"
    streamed = complete(gateway, echo=True, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == "hello<0><1>"
    assert complete(gateway, echo=True, prompt=[317, 299]).json["choices"][0]["text"] == "def fi<0><1>"
    alone = complete(gateway, echo=True, max_tokens=0, logprobs=1)
    assert alone.json["choices"][0]["text"] == "hello" and alone.json["usage"]["completion_tokens"] == 0
    assert service.generator.requests[-1].prompt_logprobs == 1 and service.generator.requests[-1].max_tokens == 1


def test_token_ids_are_given_back_where_they_are_asked_for(gateway: Gateway) -> None:
    prompt = list(TOKENIZER.encode_prompt("hello"))
    choice = complete(gateway, return_token_ids=True).json["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, [0, 1])
    events = complete(gateway, return_token_ids=True, stream=True).events
    assert [event["choices"][0]["prompt_token_ids"] for event in events] == [prompt, None, None]
    assert [token_id for event in events for token_id in event["choices"][0]["token_ids"]] == [0, 1]
    answer = chat(gateway, return_token_ids=True).json
    assert answer["choices"][0]["token_ids"] == [0, 1] and answer["prompt_token_ids"]
    written = complete(gateway, logprobs=1, return_tokens_as_token_ids=True).json["choices"][0]["logprobs"]
    assert written["tokens"] == ["token_id:0", "token_id:1"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, slice(-2, None)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, slice(2)),
        ({"truncate_prompt_tokens": 100}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"add_special_tokens": False}, slice(1, None)),
    ],
)
def test_prompts_are_truncated(service: Service, gateway: Gateway, fields: dict[str, Any], kept: slice) -> None:
    assert complete(gateway, **fields).status == 200
    assert service.generator.requests[0].prompt_token_ids == TOKENIZER.encode_prompt("hello")[kept]


@pytest.mark.parametrize(
    ("path", "fields", "num_output"),
    [
        ("/v1/completions", {"prompt": "a " * 9000}, 16),
        ("/v1/completions", {"prompt": "a " * 9000, "max_tokens": 5}, 5),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, 1),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a " * 9000}], "max_completion_tokens": 50},
            50,
        ),
    ],
)
def test_a_prompt_is_truncated_to_what_its_output_leaves(
    service: Service, gateway: Gateway, path: str, fields: dict[str, Any], num_output: int
) -> None:
    assert ask(gateway, path, {**fields, "truncate_prompt_tokens": -1}).status == 200
    prompt = service.generator.requests[0].prompt_token_ids
    assert prompt is not None and len(prompt) == 4096 - num_output


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [1, 50, 4095])
def test_a_long_text_is_truncated_as_the_whole_of_it_would_be(side: str, most: int) -> None:
    text = " ".join(f"word {number * number}, then" for number in range(8000))
    encoded: list[int] = []
    tokenizer = TextTokenizer(TOKENIZER.backend, bos_token_id=0)
    encode = tokenizer.encode_part

    def noted(part: str, **options: Any) -> list[int]:
        encoded.append(len(part))
        return encode(part, **options)

    tokenizer.encode_part = noted  # type: ignore[method-assign,assignment]
    kept = tokenizer.encode_truncated(text, most, keeps_end=side == "left")
    whole = TOKENIZER.encode_prompt(text)
    assert kept == (whole[-most:] if side == "left" else whole[:most])
    assert max(encoded) <= 8 * (most + 64) < len(text)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_truncation_lifts_no_bound_of_what_is_tokenized(gateway: Gateway, path: str, monkeypatch: Any) -> None:
    num_characters: list[int] = []
    encode = TextTokenizer.encode_part

    def noted(self: TextTokenizer, text: str, **options: Any) -> list[int]:
        num_characters.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode_part", noted)
    body = {"prompt": "a b " * 100_000, "max_tokens": 1}
    assert ask(gateway, path, {**body, "truncate_prompt_tokens": 10}).status == 200
    refused = ask(gateway, path, {**body, "truncate_prompt_tokens": 100_000})
    assert refused.status == 400 and "tokens in its first" in refused.json["error"]["message"]
    assert max(num_characters) <= 40_000


def test_ids_are_counted_before_they_are_decoded_for_an_echo(gateway: Gateway, monkeypatch: Any) -> None:
    decoded: list[int] = []
    decode = TextTokenizer.decode

    def noted(self: TextTokenizer, token_ids: Any, **options: Any) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(TextTokenizer, "decode", noted)
    error = complete(gateway, prompt=[1] * 100_000, echo=True).json["error"]
    assert error["message"] == "prompt: has 100000 tokens; at most 4095 leave room for one of output"
    truncated = complete(gateway, prompt=[1] * 100_000, echo=True, truncate_prompt_tokens=4, max_tokens=0)
    assert truncated.json["choices"][0]["text"] == TOKENIZER.decode([1] * 4, skip_special_tokens=False)
    assert max(decoded) <= 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m" * 1_000_000, "prompt": "a"}),
        ("/v1/chat/completions", {"model": "\0" * 100_000, "messages": MESSAGES}),
        ("/v1/models/" + "m" * 60_000, None),
        ("/" + "m" * 60_000, None),
    ],
)
def test_an_error_shows_the_beginning_of_a_long_name(gateway: Gateway, path: str, body: Any) -> None:
    answer = ask(gateway, path, body)
    assert answer.status == 404 and len(answer.body) < 1000


def _values(name: str) -> dict[str, Any]:
    """Values of the fields: the name as the text, or a name in an object."""
    chat, message = {"chat_template_kwargs": {name: 1}}, {"role": "user", "content": "a"}
    return {
        **{
            field: {"prompt": "a", field: name}
            for field in ("temperature", "n", "stop", "cache_salt", "echo", "suffix")
        },
        **{
            field: {"prompt": "a", field: {name: name}} for field in ("logit_bias", "response_format", "stream_options")
        },
        "prompt": {"prompt": {name: name}},
        "names": {name: 1},
        "role": {"messages": [{**message, "role": name}]},
        "content": {"messages": [{**message, "content": [{"type": name}]}]},
        "tools": {"messages": [message], "tools": [{"type": name, name: name}]},
        "tool_choice": {"messages": [message], "tool_choice": name},
        "template": {"messages": [message], "chat_template": name},
        "variables": {"messages": [message], **chat},
    }


@pytest.mark.parametrize("what", _values(""))
def test_an_error_about_a_field_shows_the_beginning_of_what_a_caller_wrote(gateway: Gateway, what: str) -> None:
    body = _values("n" * 100_000)[what]
    answer = ask(
        gateway, "/v1/chat/completions" if "messages" in body else "/v1/completions", {"max_tokens": 1, **body}
    )
    assert len(answer.body) < 1000


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"max_tokens": "a"}, "max_tokens: must be a valid integer, not 'a'"),
        ("/v1/completions", {"stream": "maybe"}, "stream: must be a valid boolean, not 'maybe'"),
        ("/v1/completions", {"stop": [None]}, "stop[0]: must be a valid string, not null"),
        ("/v1/completions", None, "body: must be a JSON object, not null"),
        ("/v1/completions", [], "body: must be a JSON object, not a list"),
        ("/v1/completions", 1.5, "body: must be a JSON object, not a number"),
        (
            "/v1/completions",
            {"prompt": 5},
            "prompt: must be a text, a list of texts, token ids, or a list of lists of them, not 5",
        ),
        ("/v1/completions", {"prompt": "x", "stop": 5}, "stop: must be a text or a list of texts, not 5"),
        ("/v1/completions", {"messages": []}, "prompt: must be given; messages is a field of /v1/chat/completions"),
        ("/v1/chat/completions", {"prompt": "x"}, "messages: must be given; prompt is a field of /v1/completions"),
        ("/v1/chat/completions", {}, "messages: must be given"),
        ("/tokenize", {}, "prompt: must be given, or messages"),
        ("/detokenize", {}, "tokens: must be given"),
    ],
)
def test_messages_say_once_and_in_words_of_json_what_is_wrong(
    gateway: Gateway, path: str, body: Any, message: str
) -> None:
    answer = ask(gateway, path, json.dumps(body).encode())
    assert (answer.status, answer.json["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/completions", 404, "Not Found: POST /completions; did you mean /v1/completions?"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/embeddings", 404, "; only text is generated; embeddings, scores and classes are not computed"),
        ("POST", "/v1/audio/speech", 404, "; only text is read and written"),
        ("POST", "/v1/other", 404, "; docs/http.md lists what is served"),
        ("GET", "/v1/completions", 405, "Method Not Allowed: GET /v1/completions; the method is POST"),
    ],
)
def test_another_path_or_method_is_told_what_was_probably_meant(
    gateway: Gateway, method: str, path: str, status: int, said: str
) -> None:
    answer = ask(gateway, path, None if method == "GET" else {})
    assert answer.status == status
    assert answer.json["error"]["message"].endswith(said)


def test_degrees_of_reasoning_are_those_of_vllm(gateway: Gateway) -> None:
    assert chat(gateway, reasoning_effort="xhigh").status == 200
    answer = chat(gateway, reasoning_effort="huge")
    assert (answer.status, answer.json["error"]["param"]) == (400, "reasoning_effort")
    assert answer.json["error"]["message"].endswith("'xhigh' or 'max', not 'huge'")


def test_a_role_that_neither_the_api_nor_the_template_knows_is_refused(gateway: Gateway) -> None:
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert chat(gateway, messages=[{"role": role, "content": "a"}]).status == 200
    answer = chat(gateway, messages=[{"role": "user", "content": "a"}, {"role": "usr", "content": "a"}])
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[1].role")
    assert "system, developer, user" in answer.json["error"]["message"]


def test_a_misspelled_field_is_named_with_the_one_it_resembles(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    answer = complete(gateway, temprature=0.5, store=True, metadata={}, something_else=1)
    assert answer.status == 200
    assert answer.headers["x-outrider-misspelled-fields"] == "temprature (did you mean temperature?)"
    assert "temprature (did you mean temperature?)" in caplog.text
    assert "x-outrider-misspelled-fields" not in complete(gateway, user="a", session_id="b").headers
    odd = chat(gateway, **{"top_\u2028p": 1, "max_tokens\r\nx": 1})
    assert odd.status == 200 and "\\r\\nx" in odd.headers["x-outrider-misspelled-fields"]


def test_metrics_are_on_the_port_of_http(service: Service) -> None:
    watch = HttpWatch()
    gateway = Gateway(service.address, watch=watch, metrics=watch.readings)
    try:
        complete(gateway)
        answer = ask(gateway, "/metrics")
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
        line = 'outrider_http_requests_total{path="/v1/completions",status="200"} 1.0'
        assert line in answer.body.decode()
    finally:
        gateway.close()


def test_probes_of_other_servers_find_health_and_metrics_without_a_key(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("key\n")
    gateway = Gateway(service.address, tokens=TokenFile("api_token_file", str(path)))
    try:
        assert ask(gateway, "/ping").status == ask(gateway, "/ping", {}).status == 200
        assert ask(gateway, "/metrics").status == 200
        service.stop()
        assert ask(gateway, "/ping").status == 503
    finally:
        gateway.close()


def test_a_chats_last_message_is_continued(service: Service, gateway: Gateway) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I say"}]
    answer = chat(gateway, messages=messages, continue_final_message=True, echo=True)
    assert answer.json["choices"][0]["message"]["content"] == "I say<0><1>"
    rendered = TOKENIZER.encode_prompt("<user>hi</user><assistant>I say", add_special_tokens=False)
    assert service.generator.requests[0].prompt_token_ids == rendered


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_an_empty_list_of_tools_is_none(service: Service, gateway: Gateway, fields: dict[str, str]) -> None:
    assert chat(gateway, tools=[], **fields).status == 200
    assert chat(gateway, tools=[], **fields).json["usage"] == chat(gateway).json["usage"]


@pytest.mark.parametrize(
    "field",
    ["model", "prompt", "user", "stop", "cache_salt", "request_id", "bad_words", "suffix", "acceptance_method", "x"],
)
@pytest.mark.parametrize("half", ["\ud800", "a\udfffb", "\udc00\ud83d"])
def test_half_of_a_surrogate_pair_is_refused_by_its_field(gateway: Gateway, field: str, half: str) -> None:
    value = [half] if field == "bad_words" else half
    body = json.dumps({"prompt": "hello", field: value}).encode()
    answer = ask(gateway, "/v1/completions", body, JSON)
    assert (answer.status, answer.json["error"]["param"]) == (400, field)


def test_a_field_named_by_half_of_a_surrogate_pair_is_refused(gateway: Gateway) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = ask(gateway, path, b'{"prompt": "hello", "\\ud800": 1}', JSON)
        assert (answer.status, answer.json["error"]["param"]) == (400, "\\ud800")


def test_whole_surrogate_pairs_are_text(gateway: Gateway) -> None:
    assert ask(gateway, "/v1/completions", b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}', JSON).status == 200


def test_tools_reach_the_template(service: Service, gateway: Gateway) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(gateway, tools=tools, tool_choice="none").status == 200
    text = TOKENIZER.decode(service.generator.requests[0].prompt_token_ids or (), skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "f"}}' in text


@pytest.mark.parametrize("call", [{"content": None}, {}], ids=["null", "absent"])
def test_a_call_of_a_tool_without_content_is_answered(service: Service, gateway: Gateway, call: dict[str, Any]) -> None:
    template = (Path(__file__).parents[1] / "tokenization" / "templates" / "qwen3.jinja").read_bytes()
    service.generator.tokenizer = TEXT.with_chat_template(template).files
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}]
    answer = chat(
        gateway,
        messages=[
            *MESSAGES,
            {"role": "assistant", **call, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
    )
    assert answer.status == 200
    text = TOKENIZER.decode(service.generator.requests[0].prompt_token_ids or (), skip_special_tokens=False)
    assert '{"name": "f", "arguments": {"city": "Rome"}}' in text and "rain" in text


def test_tokenize_takes_the_prompt_of_a_prompt_and_messages_as_vllm_does(gateway: Gateway) -> None:
    """Union of two request models: the one of which more fields are given, else that of a prompt."""
    both = {"prompt": "héllo", "messages": MESSAGES}
    of_prompt, of_messages = (ask(gateway, "/tokenize", {key: value}).json["tokens"] for key, value in both.items())
    assert ask(gateway, "/tokenize", both).json["tokens"] == of_prompt
    assert ask(gateway, "/tokenize", {**both, "add_generation_prompt": True}).json["tokens"] == of_messages


def test_tokenize_and_detokenize(gateway: Gateway) -> None:
    ids = list(TOKENIZER.encode_prompt("héllo"))
    found = ask(gateway, "/tokenize", {"prompt": "héllo", "return_token_strs": True}).json
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 4096)
    assert len(found["token_strs"]) == len(ids)
    bare = ask(gateway, "/tokenize", {"prompt": "héllo", "add_special_tokens": False}).json
    assert bare["tokens"] == ids[1:] and bare["token_strs"] is None
    assert ask(gateway, "/detokenize", {"tokens": ids[1:]}).json == {"prompt": "héllo"}
    rendered = ask(gateway, "/tokenize", {"messages": MESSAGES}).json["tokens"]
    assert rendered == list(TOKENIZER.encode_prompt("<user>hi</user><assistant>", add_special_tokens=False))
    assert ask(gateway, "/detokenize", {"tokens": [1000]}).json["error"]["param"] == "tokens"


def test_names_and_traces_pass_through(service: Service, gateway: Gateway) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {**JSON, "x-request-id": "mine", "traceparent": trace, "tracestate": "v=1"}
    answer = ask(gateway, "/v1/completions", {"prompt": "hello", "max_tokens": 1}, headers)
    assert answer.headers["x-request-id"] == "mine" and answer.json["id"] == "cmpl-mine"
    request = service.generator.requests[0]
    assert (request.request_id, request.trace_parent, request.trace_state) == ("cmpl-mine", trace, "v=1")
    other = ask(gateway, "/v1/completions", {"prompt": "hello", "max_tokens": 1}, {**JSON, "traceparent": "nonsense"})
    assert other.status == 200 and other.json["id"] == f"cmpl-{other.headers['x-request-id']}"
    assert service.generator.requests[1].trace_parent == ""


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/completions", b"{", JSON, 400),
        ("/v1/completions", b"[]", JSON, 400),
        ("/v1/completions", b"[" * 100_000, JSON, 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', JSON, 400),
        ("/v1/completions", b"\xff", JSON, 400),
        ("/v1/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("/v1/completions", b"x" * 5000, JSON, 413),
        ("/v1/completions", None, JSON, 405),
        ("/v1/embeddings", b"{}", JSON, 404),
    ],
)
def test_a_request_that_is_none_is_refused_in_openais_shape(
    service: Service, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    gateway = Gateway(service.address, max_body_bytes=5_000 - 1 if status == 413 else 1 << 20)
    try:
        answer = ask(gateway, path, body, headers)
        assert answer.status == status
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json["error"]["code"] == status
    finally:
        gateway.close()


def test_a_body_without_a_length_is_bounded_too(service: Service) -> None:
    gateway = Gateway(service.address, max_body_bytes=1000)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=120)
    try:
        parts: Iterator[bytes] = iter([b'{"prompt": "'] + [b"x" * 100] * 20)
        connection.request("POST", "/v1/completions", parts, JSON, encode_chunked=True)
        assert connection.getresponse().status == 413
    finally:
        connection.close()
        gateway.close()


def test_keys_are_those_of_the_token_file_as_it_is_now(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("first\n")
    gateway = Gateway(service.address, tokens=TokenFile("api_token_file", str(path)))
    try:

        def status(key: str | None, path: str = "/v1/models") -> int:
            return ask(gateway, path, None, {} if key is None else {"authorization": f"Bearer {key}"}).status

        assert [status(None), status("wrong"), status("first")] == [401, 401, 200]
        assert [status(None, path) for path in ("/health", "/version", "/tokenize")] == [200, 200, 401]
        path.write_text("second-key\n")
        assert [status("first"), status("second-key")] == [401, 200]
    finally:
        gateway.close()


def test_requests_of_different_keys_share_no_cached_prompts(service: Service, tmp_path: Path) -> None:
    """``usage`` would otherwise tell each of them what the others have sent."""
    path = tmp_path / "tokens"
    path.write_text("first\nsecond\n")
    gateway = Gateway(service.address, tokens=TokenFile("api_token_file", str(path)))
    body = {"prompt": "hello", "max_tokens": 2}

    def salt(key: str, **fields: Any) -> str:
        headers = {**JSON, "authorization": f"Bearer {key}"}
        assert ask(gateway, "/v1/completions", {**body, **fields}, headers).status == 200
        return service.generator.requests[-1].cache_salt

    try:
        first, second = salt("first"), salt("second")
        assert first and second and first != second and salt("first") == first
        assert "first" not in first
        assert salt("first", cache_salt="shared") == "shared"
        path.write_text("first\n")
        assert salt("first") == ""
    finally:
        gateway.close()


def test_a_failure_that_many_requests_meet_is_one_warning(
    service: Service, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    service.generator.error = UnavailableError("no target")
    assert {complete(gateway).status for _ in range(20)} == {503}
    assert len([record for record in caplog.records if "no target" in record.message]) == 1


def test_a_callers_key_goes_on_to_a_coordinator_that_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("first\nsecond\n")
    service = Service(security=ServerSecurity(tokens=TokenFile("api_token_file", str(path))))
    service.generator.tokenizer = TEXT.files
    gateway = Gateway(service.address, token=caller_key)
    try:
        assert ask(gateway, "/health").status == 200
        body = {"prompt": "hello", "max_tokens": 2, "stream": True}

        def answer(key: str) -> Answer:
            return ask(gateway, "/v1/completions", body, {**JSON, "authorization": f"Bearer {key}"})

        refused = ask(gateway, "/v1/completions", body)
        assert refused.status == 401 and "Authorization: Bearer KEY" in refused.json["error"]["message"]
        assert [answer(key).status for key in ("first", "wrong", "second")] == [200, 401, 200]
    finally:
        gateway.close()
        service.close()


def test_health_follows_the_coordinator(service: Service, gateway: Gateway) -> None:
    assert ask(gateway, "/health").status == 200
    assert ask(gateway, "/version").json == {"version": __version__}
    service.stop()
    assert ask(gateway, "/health").status == 503
    service.start_again()
    wait_until(lambda: ask(gateway, "/health").status == 200, "health")


def test_served_names_are_the_ones_that_requests_use(service: Service) -> None:
    gateway = Gateway(service.address, names=("big", "alias"))
    try:
        assert [card["id"] for card in ask(gateway, "/v1/models").json["data"]] == ["big", "alias"]
        assert complete(gateway, model="alias").json["model"] == "alias"
        assert complete(gateway).json["model"] == "big"
        assert complete(gateway, model="scripted").status == 404
    finally:
        gateway.close()


def test_a_model_without_a_tokenizer_takes_token_ids(service: Service, gateway: Gateway) -> None:
    service.generator.tokenizer = type(service.generator.tokenizer)()
    assert complete(gateway, prompt=[1, 2]).status == 200
    assert complete(gateway).json["error"]["param"] == "prompt"
    assert chat(gateway).json["error"]["param"] == "messages"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_without_room_for_a_token_names_the_field_that_was_sent(gateway: Gateway, field: str) -> None:
    body = {"messages": MESSAGES, field: 0}
    answer = ask(gateway, "/v1/chat/completions", body)
    assert answer.status == 400 and answer.json["error"]["param"] == field
