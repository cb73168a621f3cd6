"""``instructor`` in its modes TOOLS, JSON and JSON_SCHEMA. Argument: address of the server."""

from __future__ import annotations

import contextlib
import sys
from typing import Literal

import instructor
from instructor.core import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Size(BaseModel):
    """Size of a thing."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["small", "large"]
    is_known: bool


class Anything(BaseModel):
    """Any JSON object, as mode JSON asks for."""

    model_config = ConfigDict(extra="allow")


def ask(mode: instructor.Mode, wanted: type[BaseModel], seed: int) -> None:
    with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0) as client:
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": "size as JSON: "}],
            response_model=wanted,
            max_retries=0,
            max_tokens=120,
            temperature=1.0,
            seed=seed,
        )
        assert isinstance(found, wanted), (mode, found)


ask(instructor.Mode.TOOLS, Size, 1)
ask(instructor.Mode.JSON_SCHEMA, Size, 2)
num_whole = 0
for seed in range(4):
    with contextlib.suppress(IncompleteOutputException):
        ask(instructor.Mode.JSON, Anything, seed)
        num_whole += 1
assert num_whole
