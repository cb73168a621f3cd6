"""``litellm``: a chat whole and streamed, JSON modes, and an enforced call. Argument: address of the server."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, ConfigDict


class Size(BaseModel):
    """Size of a thing."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["small", "large"]
    is_known: bool


asked: dict[str, Any] = {
    "model": "openai/target",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "size as JSON: "}],
    "temperature": 0.8,
    "num_retries": 0,
}
assert litellm.completion(**asked, max_tokens=5).choices[0].finish_reason == "length"
chunks = list(litellm.completion(**asked, max_tokens=5, stream=True))
assert any(chunk.choices[0].delta.content for chunk in chunks)
text = litellm.completion(**asked, max_tokens=200, response_format=Size).choices[0].message.content
Size.model_validate_json(text)
given = {"type": "json_schema", "json_schema": {"name": "size", "schema": Size.model_json_schema(), "strict": True}}
text = litellm.completion(**asked, max_tokens=200, response_format=given).choices[0].message.content
Size.model_validate_json(text)
choice = litellm.completion(**asked, max_tokens=300, response_format={"type": "json_object"}).choices[0]
assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
tool = {"type": "function", "function": {"name": "size", "parameters": Size.model_json_schema()}}
choice = litellm.completion(
    **asked, max_tokens=200, tools=[tool], tool_choice="required", parallel_tool_calls=False
).choices[0]
(call,) = choice.message.tool_calls
assert call.function.name == "size"
Size.model_validate_json(call.function.arguments)
