"""The real ``openai`` and LangChain clients get structured output and enforced calls of the embedded pair over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, SecretStr

from tests.gateway.conftest import Gateway
from tests.support.stack import run_stack

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class Size(BaseModel):
    """Size of a thing."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["small", "large"]
    is_known: bool


def parse(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "target", "messages": [{"role": "user", "content": "def size():"}], "max_tokens": 200}
        asked |= {"temperature": 1.0}
        parsed = client.chat.completions.parse(**asked, response_format=Size).choices[0].message.parsed
        assert isinstance(parsed, Size)
        with client.chat.completions.stream(**asked, response_format=Size) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Size)
        found = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
        assert found.finish_reason == "length" or isinstance(json.loads(found.message.content or ""), dict)


def call(url: str) -> None:
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    function = {"name": "add", "parameters": {**parameters, "additionalProperties": False}}
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            asked: Any = {"model": "target", "messages": [{"role": "user", "content": "x = "}], "temperature": 0.0}
            asked |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
            found = client.chat.completions.create(**asked, max_tokens=100, parallel_tool_calls=False).choices[0]
            calls: Any = found.message.tool_calls
            assert found.finish_reason == "tool_calls" and len(calls) == 1
            assert calls[0].function.name == "add" and json.loads(calls[0].function.arguments)["n"] in (1, 2)
        for stop, reason in ((":", "stop"), ("absent", "tool_calls")):
            found = client.chat.completions.create(**asked, max_tokens=100, stop=[stop]).choices[0]
            assert found.message.tool_calls and found.finish_reason == reason


def langchain(url: str) -> None:
    for method in ("function_calling", "json_schema", "json_mode"):
        model = ChatOpenAI(
            model="target", base_url=f"{url}/v1", api_key=SecretStr("none"), max_retries=0, temperature=1.0, seed=4
        )
        bound: Any = model.with_structured_output(Size, method=method, include_raw=True)
        found = bound.invoke("size as JSON: ", max_tokens=300)
        if method != "json_mode":  # which asks for any object
            assert isinstance(found["parsed"], Size), found


@pytest.mark.parametrize("use", (parse, call, langchain))
async def test_a_client_gets_what_it_asks_for(tmp_path: Path, use: Callable[[str], None]) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    template = str(tmp_path / "template.jinja")
    async with run_stack(PAIR / "target", PAIR / "draft", wire=True, chat_template=template) as stack:
        gateway = Gateway(stack.addresses["coordinator"], names=("target",))
        try:
            await asyncio.to_thread(use, gateway.url)
        finally:
            await asyncio.to_thread(gateway.close)
