"""LangChain's OpenAI classes against the gateway."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.client.conftest import Service
from tests.gateway.conftest import Gateway

NAME = "langchain_openai"
"""Package of the dev extra: in CI it is there, and an older environment may lack it."""
langchain: Any = importlib.import_module(NAME) if os.environ.get("CI") else pytest.importorskip(NAME)


def test_a_chat_model_answers_whole_and_streamed(service: Service, gateway: Gateway) -> None:
    model = langchain.ChatOpenAI(base_url=f"{gateway.url}/v1", api_key="none", model="scripted", max_tokens=3)
    assert model.invoke([("system", "Be brief."), ("human", "hi")]).content == "<0><1><2>"
    chunks = list(model.stream("hi"))
    assert "".join(chunk.content for chunk in chunks) == "<0><1><2>"
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in told] in ([], [3])
    assert model.bind(stop=["x"], seed=3).invoke("hi").response_metadata["finish_reason"] == "length"
    assert service.generator.requests[-1].stop == ("x",)


def test_a_completion_model_answers_a_batch(gateway: Gateway) -> None:
    model = langchain.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", model="scripted", max_tokens=2)
    assert model.invoke("hello") == "<0><1>"
    assert model.batch(["a", "b", "c"]) == ["<0><1>"] * 3
    assert "".join(model.stream("hello")) == "<0><1>"
