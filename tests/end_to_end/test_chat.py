"""Conversations through the whole stack: the template of the target's folder, its sampling defaults, special tokens."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client.requests import build_request
from outrider.client.resuming import ResumableGeneration
from outrider.errors import InvalidRequestError
from outrider.tokenization import ModelText
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import EOS_TOKEN, cached_tiny_model

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
RENDERED = f"<user>Hello{EOS_TOKEN}<assistant>Hi{EOS_TOKEN}<user>?{EOS_TOKEN}:"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model that can chat, and is greedy unless asked otherwise."""
    folder = shutil.copytree(cached_tiny_model("llama", seed=1), tmp_path / "chatty")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TOKEN}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[-1].content }}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    known = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**known, "temperature": 0.0}))
    return folder


@pytest.fixture
async def stack(folder: Path) -> AsyncIterator[Stack]:
    async with run_stack(folder, folder, wire=True, draft_timeout_ms=60_000) as stack:
        yield stack


async def test_a_chat_is_the_generation_from_its_rendered_prompt(stack: Stack, folder: Path) -> None:
    assert stack.client is not None
    files = await stack.client.tokenizer_files()
    text = ModelText.from_files(files.files, bos_token_id=files.bos_token_id)
    assert text.tokenizer is not None
    prompt = text.tokenizer.encode_prompt(RENDERED, add_special_tokens=False)
    expected = await stack.client.generate(prompt_token_ids=prompt, max_tokens=12, temperature=0)
    found = await stack.client.chat(MESSAGES, max_tokens=12)
    assert found.token_ids == expected.token_ids and found.usage.prompt_tokens == len(prompt)
    resumed = await stack.client.chat(MESSAGES, max_tokens=12, resume=True)
    assert resumed.token_ids == expected.token_ids
    short = await stack.client.chat(MESSAGES, max_tokens=1, chat_template="short")
    assert short.usage.prompt_tokens == len(text.tokenizer.encode_prompt("?", add_special_tokens=False))
    with pytest.raises(InvalidRequestError, match="default, short"):
        await stack.client.chat(MESSAGES, chat_template="long")


async def test_special_tokens_are_shown_where_they_are_asked_for(stack: Stack, folder: Path) -> None:
    assert stack.client is not None
    end = ModelText.from_folder(folder).tokenizer
    assert end is not None
    (end_id,) = end.encode_prompt(EOS_TOKEN, add_special_tokens=False)
    options = {"prompt": "Hello", "allowed_token_ids": [end_id], "max_tokens": 3, "ignore_eos": True}
    assert (await stack.generate(**options)).text == ""
    assert (await stack.generate(**options, skip_special_tokens=False)).text == 3 * EOS_TOKEN


async def test_a_stream_resumes_with_the_defaults_that_it_began_with(folder: Path) -> None:
    path = folder / "generation_config.json"
    own = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.6}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    options: Any = {"prompt": "Hello", "max_tokens": 24, "seed": 5, "acceptance_method": "coupled", "ignore_eos": True}
    generation = ResumableGeneration(build_request(options)[0])
    async with run_stack(folder, wire=True) as first:
        assert first.client is not None
        expected = await first.client.generate(**options)
        async with contextlib.aclosing(first.coordinator.generate_stream(generation.next_request())) as deltas:
            num_tokens = 0
            async for delta in deltas:
                given = generation.take(delta)
                num_tokens += 0 if given is None else len(given.token_ids)
                if num_tokens >= 6:
                    break
    async with run_stack(folder, wire=True, generation_config="none") as other:
        assert other.client is not None
        assert (await other.client.generate(**options)).token_ids != expected.token_ids
        results = [
            given.result
            async for delta in other.coordinator.generate_stream(generation.next_request())
            if (given := generation.take(delta)) is not None and given.result is not None
        ]
    assert [result.token_ids for result in results] == [expected.token_ids]


async def test_sampling_defaults_are_the_models_own(stack: Stack) -> None:
    greedy = await stack.generate(prompt="Hello", max_tokens=16, seed=1)
    assert greedy.token_ids == (await stack.generate(prompt="Hello", max_tokens=16, seed=2)).token_ids
    drawn = [await stack.generate(prompt="Hello", max_tokens=16, seed=seed, temperature=1.0) for seed in range(3)]
    assert len({result.token_ids for result in drawn}) > 1
