"""Recorded outputs streamed as tokens: cut at every token, also where each byte is a token, and token by token."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from outrider.chat import ChatPrompt
from outrider.tokenization import TextTokenizer
from outrider.tokenization.chat import ChatRenderer
from outrider.tokenization.output_parsing import choose_format, parse_output
from outrider_coordinator.text import Detokenizer
from tests.structured_output.vocabularies import FILE
from tests.tokenization.output_parsing.recorded import CASES, TOOLS, WEATHER, Case
from tests.tokenization.output_parsing.test_output_parsing import TEMPLATES, check, parsed

_MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)


def _tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(FILE.read_text())
    made.add_special_tokens([AddedToken(text, special=True) for text in _MARKERS])
    return made


TOKENIZER = _tokenizer()
TEXT = TextTokenizer(TOKENIZER)


def _byte_ids(token_id: int) -> list[int]:
    """A token for each byte of a token's text; special tokens stay whole."""
    name = TOKENIZER.id_to_token(token_id) or ""
    return [token_id] if name in _MARKERS else [TOKENIZER.token_to_id(byte) or 0 for byte in name]


def streamed(text: str, *, is_by_byte: bool) -> list[str]:
    """The text that each token of an output adds."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if is_by_byte:
        ids = [byte for token_id in ids for byte in _byte_ids(token_id)]
    detokenizer = Detokenizer(TEXT, skip_special_tokens=False)
    parts = [detokenizer.push(token_id) for token_id in ids]
    assert "".join([*parts, detokenizer.flush()]) == text
    return parts


@pytest.mark.parametrize("is_by_byte", (False, True), ids=("tokens", "bytes"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_output_is_the_same_wherever_its_stream_is_cut(case: Case, *, is_by_byte: bool) -> None:
    parts = streamed(case.text, is_by_byte=is_by_byte)
    check(case, parsed(case, parts))
    for cut in range(len(parts) + 1):
        check(case, parsed(case, ["".join(parts[:cut]), "".join(parts[cut:])]))


ENDS = {
    "qwen2_5": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "mistral": "</s>",
    "llama3": "<|eot_id|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "gpt_oss": "",
}
"""End of a message in a template, of which the end of sequence is no text of an output."""


@pytest.mark.parametrize("name", ENDS)
def test_a_call_that_a_template_renders_is_parsed(name: str) -> None:
    """Models write what they were trained on."""
    template = (TEMPLATES / f"{name}.jinja").read_bytes()
    render = ChatRenderer.from_files(
        {"chat_template.jinja": template, "tokenizer_config.json": b'{"bos_token": "<s>", "eos_token": "</s>"}'}
    ).render
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": WEATHER}}
    asked = {"role": "user", "content": "Weather?"}
    prompt = render(ChatPrompt((asked,), tools=tuple(TOOLS))).removesuffix("<think>\n")
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = render(ChatPrompt((asked, called), tools=tuple(TOOLS), add_generation_prompt=False))
    assert whole.startswith(prompt) and whole.endswith(ENDS[name])
    parser = choose_format(template.decode()).make_parser(TOOLS, prompt)
    assert parser is not None
    found = parse_output(parser, whole.removeprefix(prompt).removesuffix(ENDS[name]))
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [("get_weather", WEATHER)]
    assert not found.content.strip()
