"""Agents of LangChain: one that calls tools until it gives a structured answer, and one whose answer is JSON.

Argument: address of the server. Schemas are no classes, of which LangChain leaves ``additionalProperties`` out.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def schema_of(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "title": name, "description": name, "properties": properties, **closed}


THING = schema_of("look_up", {"name": {"enum": ["box", "house"]}})
SIZE = schema_of("size", {"kind": {"enum": ["small", "large"]}, "is_known": {"type": "boolean"}})
looked_up: list[str] = []


def look_up(name: str) -> str:
    looked_up.append(name)
    return f"The {name} is large."


def model_of(seed: int) -> ChatOpenAI:
    return ChatOpenAI(
        model="target",
        base_url=f"{sys.argv[1]}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        temperature=1.0,
        seed=seed,
        model_kwargs={"parallel_tool_calls": False},
    )


tool = StructuredTool(name="look_up", description="Look a thing up.", args_schema=THING, func=look_up)
question = {"messages": [("user", "How large is a house?")]}
for seed in range(20):
    agent = create_agent(model_of(seed), [tool], response_format=ToolStrategy(SIZE))
    answer = agent.invoke(question, {"recursion_limit": 60})["structured_response"]
    assert answer["kind"] in ("small", "large") and isinstance(answer["is_known"], bool), answer
    if looked_up:  # the model may choose either at each turn
        break
assert looked_up
answer = create_agent(model_of(1), [], response_format=ProviderStrategy(SIZE)).invoke(question)["structured_response"]
assert answer["kind"] in ("small", "large"), answer
