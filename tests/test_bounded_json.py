"""Bounded JSON: what is counted, what is refused before it is parsed, and that work on it has pauses."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from outrider.chat import ChatPrompt, check_chat, checks_of_chat
from outrider.cooperative import run
from outrider.errors import InvalidRequestError
from outrider.limits import JSON_VALUES, Bound, bounded_json
from outrider.limits.bounded_json import checks_of_json, parse_json
from outrider.transport.convert.chat import chat_from_proto, chat_reading, chat_to_proto
from outrider.v1 import chat_pb2

MOST = JSON_VALUES.most
SIGNS = '"\\,:[{]} \n' + string.ascii_letters + "é\u2028\U0001f600"


def random_json(drawn: random.Random, depth: int = 4) -> Any:
    kind = drawn.randrange(5 if depth else 3)
    if kind == 0:
        return "".join(drawn.choices(SIGNS, k=drawn.randrange(12)))
    if kind < 3:
        return drawn.choice([None, True, 1.5, -3])
    inner = [random_json(drawn, depth - 1) for _ in range(drawn.randrange(4))]
    return inner if kind == 3 else {f'"{place},': entry for place, entry in enumerate(inner)}


def num_signs(value: Any) -> int:
    """Lists, objects, names and separators."""
    if isinstance(value, dict):
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(num_signs, value.values()))
    return 1 + max(0, len(value) - 1) + sum(map(num_signs, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize("seed", range(200))
def test_texts_are_not_counted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    value = [random_json(drawn) for _ in range(8)]
    data = json.dumps(value, ensure_ascii=drawn.random() < 0.5, indent=drawn.choice([None, 1])).encode()
    monkeypatch.setattr(bounded_json, "SLICE_BYTES", drawn.choice([1, 2, 3, 7, 1000]))
    monkeypatch.setattr(bounded_json, "JSON_VALUES", Bound(num_signs(value), "values"))
    run(checks_of_json("body", [data]))
    monkeypatch.setattr(bounded_json, "JSON_VALUES", Bound(num_signs(value) - 1, "values"))
    with pytest.raises(
        InvalidRequestError, match=f"body: has {num_signs(value)} values; at most {num_signs(value) - 1}"
    ):
        run(checks_of_json("body", [data]))


def test_a_long_text_of_separators_is_one_value() -> None:
    run(checks_of_json("body", [json.dumps({"a": "[{,:" * 1_000_000}).encode()]))
    run(checks_of_json("body", [b'["' + b"\\\\" * 2_000_000 + b'", ' + b'"' + b'\\"[' * 1_000_000 + b'"]']))


def test_whole_numbers_of_thousands_of_digits_are_refused() -> None:
    assert parse_json("[1, -22, 3.5]") == [1, -22, 3.5]
    with pytest.raises(ValueError, match="more than 100 digits"):
        parse_json("[" + "9" * 101 + "]")


CHATS: dict[str, dict[str, list[Any]]] = {
    "messages": {"messages": [{"role": "user", "content": [[]] * MOST}]},
    "tools": {"messages": [{"role": "user", "content": "a"}], "tools": [{"a": [[]] * MOST}]},
    "documents": {"messages": [{"role": "user", "content": "a"}], "documents": [{"a": [1] * MOST}]},
}


@pytest.mark.parametrize("field", CHATS)
def test_a_chat_of_too_many_values_is_refused_before_it_is_parsed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = CHATS[field]
    message = chat_pb2.Chat(
        messages=[
            chat_pb2.ChatMessage(role="user", fields_json=json.dumps({"content": entry["content"]}))
            for entry in chat["messages"]
        ],
        tools_json=map(json.dumps, chat.get("tools", [])),
        documents_json=map(json.dumps, chat.get("documents", [])),
    )
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("it is parsed"))
    with pytest.raises(InvalidRequestError, match=f"{field}: has .* of JSON; at most {MOST}"):
        chat_from_proto(message)
    given: dict[str, Any] = {name: tuple(entries) for name, entries in chat.items()}
    with pytest.raises(InvalidRequestError, match=f"{field}.* of JSON; at most {MOST}"):
        check_chat(ChatPrompt(**given))


def test_work_on_a_chat_of_many_values_has_pauses() -> None:
    entries = tuple({"role": "user", "content": "a", "x": [1] * 20} for _ in range(4_000))
    chat = ChatPrompt(messages=entries, tools=entries[:1_000], documents=entries[:200])
    message = chat_to_proto(chat)
    assert len(list(checks_of_chat(chat))) >= 10
    assert len(list(chat_reading(message))) >= 10
    assert chat_from_proto(message) == chat


def test_a_chat_that_holds_itself_is_refused() -> None:
    entry: list[Any] = []
    entry += [entry, entry]
    with pytest.raises(InvalidRequestError, match="messages"):
        check_chat(ChatPrompt(messages=({"role": "user", "content": entry},)))
