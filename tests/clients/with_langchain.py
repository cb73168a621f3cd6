"""An agent of LangChain that calls tools until it gives a structured answer. Argument: address of the server."""

from __future__ import annotations

import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, SecretStr


class Size(BaseModel):
    """Size of a thing."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["small", "large"]
    is_known: bool


looked_up: list[str] = []


@tool
def look_up(name: Literal["box", "house"]) -> str:
    """Look a thing up."""
    looked_up.append(name)
    return f"The {name} is large."


num_answers = 0
for seed in range(4):
    model = ChatOpenAI(
        model="target",
        base_url=f"{sys.argv[1]}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        temperature=1.0,
        seed=seed,
        max_completion_tokens=80,
        model_kwargs={"parallel_tool_calls": False},
    )
    # LangChain leaves ``additionalProperties`` out of the schemas of tools, so that a small model may go on to the end.
    agent = create_agent(model, [look_up], response_format=ToolStrategy(Size))
    state = agent.invoke({"messages": [("user", "How large is a house?")]}, {"recursion_limit": 30})
    num_answers += isinstance(state["structured_response"], Size)
agent = create_agent(model, [], response_format=ProviderStrategy(Size))
state = agent.invoke({"messages": [("user", "How large is a house?")]})
assert isinstance(state["structured_response"], Size), state
assert num_answers and looked_up
