"""Outputs in the forms that models' documents show, and the parts that they consist of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from outrider.tokenization.output_parsing import OutputFormat

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "zip": {"type": ["string", "null"]},
                    "height": {"type": "number"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = {"city": "Zürich <b>", "days": 3}


@dataclass(frozen=True)
class Case:
    """One output; ``calls`` are names with their arguments."""

    name: str
    format: OutputFormat
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    prompt_end: str = ""


def of(tools: str | None = None, reasoning: str | None = None) -> OutputFormat:
    return OutputFormat(tools, reasoning)


_CALL = json.dumps({"name": "get_weather", "arguments": WEATHER}, ensure_ascii=False)
_LLAMA = json.dumps({"name": "get_weather", "parameters": WEATHER})
_ARGUMENTS = json.dumps(WEATHER, ensure_ascii=False)
_DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
_THINK = "<think>\nThe user wants\n\nweather.\n</think>\n\n"
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n["a", {"b": null}]\n</parameter>\n'
    "<parameter=options>\nnull\n</parameter>\n<parameter=zip>\n8001\n</parameter>\n<parameter=height>\n2.5\n</parameter>\n"
    "</function>\n</tool_call>"
)
_CODER_ARGUMENTS = {
    "city": "Zürich",
    "days": 3,
    "metric": True,
    "tags": ["a", {"b": None}],
    "options": None,
    "zip": "8001",
    "height": 2.5,
}

CASES = [
    # Hermes, Qwen2.5, Qwen3.
    Case("hermes", of("hermes"), f"<tool_call>\n{_CALL}\n</tool_call>", [("get_weather", WEATHER)]),
    Case(
        "hermes, two with content",
        of("hermes"),
        f'Let me look.\n\n<tool_call>\n{_CALL}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_call>",
        [("get_weather", WEATHER), ("now", {})],
        content="Let me look.",
    ),
    Case("hermes, no call", of("hermes"), "1 < 2 <tool_cal> \n", content="1 < 2 <tool_cal> \n"),
    Case(
        "hermes, arguments first",
        of("hermes"),
        '<tool_call>{"arguments": {"city": "a}</tool_call>\\""}, "name": "get_weather"}</tool_call> done',
        [("get_weather", {"city": 'a}</tool_call>"'})],
        content="done",
    ),
    Case("hermes, no arguments", of("hermes"), '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    Case("hermes, null", of("hermes"), '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
    Case(
        "hermes, arguments as a text",
        of("hermes"),
        '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 3}"}</tool_call>',
        [("get_weather", {"days": 3})],
    ),
    Case(
        "hermes, a bracket is missing",
        of("hermes"),
        f"<tool_call>\n{_CALL[:-1]}\n</tool_call>\n<tool_call>\n{_CALL}",
        [("get_weather", WEATHER), ("get_weather", WEATHER)],
    ),
    Case("hermes, no JSON", of("hermes"), "<tool_call>nothing</tool_call>", content="<tool_call>nothing</tool_call>"),
    Case(
        "qwen3",
        of("hermes", "qwen3"),
        f"{_THINK}Sunny. \n",
        content="Sunny. \n",
        reasoning="The user wants\n\nweather.",
    ),
    Case(
        "qwen3 with a call",
        of("hermes", "qwen3"),
        f"{_THINK}<tool_call>\n{_CALL}\n</tool_call>",
        [("get_weather", WEATHER)],
        reasoning="The user wants\n\nweather.",
    ),
    Case(
        "qwen3 without thinking",
        of("hermes", "qwen3"),
        f"Yes.<tool_call>\n{_CALL}\n</tool_call>",
        [("get_weather", WEATHER)],
        content="Yes.",
        prompt_end="<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    Case(
        "qwen3, a call ends the reasoning",
        of("hermes", "qwen3"),
        f"I call by <tool_call> tags.\n\n<tool_call>\n{_CALL}\n</tool_call>",
        [("get_weather", WEATHER)],
        reasoning="I call by <tool_call> tags.",
        prompt_end="<think>\n",
    ),
    Case(
        "qwen3.5, a call ends the reasoning",
        of("qwen3_coder", "qwen3"),
        f"<think>\nSo.\n{_CODER}",
        [("get_weather", _CODER_ARGUMENTS)],
        reasoning="So.",
    ),
    Case("qwen3, cut before a call", of("hermes", "qwen3"), "<think>So <tool_call>\n", reasoning="So <tool_call>"),
    Case(
        "hermes, a text for arguments",
        of("hermes"),
        '<tool_call>{"name": "now", "arguments": "here"}</tool_call>',
        [("now", "here")],
    ),
    Case("pythonic, no JSON", of("pythonic"), "[now(x=1e999)]", content="[now(x=1e999)]"),
    Case("qwen3, nothing thought", of(None, "qwen3"), "Hello </think>", content="Hello </think>"),
    Case("qwen3, cut", of(None, "qwen3"), "<think>\nSo </thi", reasoning="So </thi"),
    # DeepSeek-R1 and its distillations: newer templates open the reasoning.
    Case(
        "deepseek_r1",
        of(None, "deepseek_r1"),
        "First this.\n</think>\n\nThen that.",
        content="Then that.",
        reasoning="First this.",
        prompt_end="<｜Assistant｜><think>\n",
    ),
    Case("deepseek_r1, older", of(None, "deepseek_r1"), "<think>\na\n</think>\nb", content="b", reasoning="a"),
    Case("reasoning, code after it", of(None, "qwen3"), "<think>a</think>\n\n  b\n", content="  b\n", reasoning="a"),
    Case("deepseek_r1, no mark", of(None, "deepseek_r1"), "a</think>b", content="b", reasoning="a"),
    Case("deepseek_r1, cut", of(None, "deepseek_r1"), "a b", reasoning="a b"),
    Case(
        "deepseek_r1, template",
        of("deepseek_v3", "qwen3"),
        "a\n</think>\n\nb",
        [],
        "b",
        "a",
        "<｜Assistant｜><think>\n",
    ),
    Case(
        "deepseek_r1, calls",
        of("deepseek_v3", "deepseek_r1"),
        f"The tool knows.\n</think>\n\nI look.\n\n<｜tool▁calls▁begin｜>{_DEEPSEEK % ('get_weather', _ARGUMENTS)}\n"
        f"{_DEEPSEEK % ('now', '{}')}<｜tool▁calls▁end｜>",
        [("get_weather", WEATHER), ("now", {})],
        "I look.",
        "The tool knows.",
        "<｜Assistant｜><think>\n",
    ),
    Case(
        "deepseek_v3, a block in a text",
        of("deepseek_v3"),
        _DEEPSEEK % ("get_weather", '{"city": "```json 1 ```"}'),
        [("get_weather", {"city": "```json 1 ```"})],
    ),
    Case(
        "deepseek_v3, markers in a text",
        of("deepseek_v3"),
        "<｜tool▁calls▁begin｜>"
        + _DEEPSEEK % ("get_weather", '{"city": "<｜tool▁call▁end｜>"}\n')
        + "\n"
        + _DEEPSEEK % ("now", "{}")
        + "<｜tool▁calls▁end｜>",
        [("get_weather", {"city": "<｜tool▁call▁end｜>"}), ("now", {})],
    ),
    Case(
        "deepseek_v3, text", of("deepseek_v3"), "a <｜tool b\n```json\n1\n```", content="a <｜tool b\n```json\n1\n```"
    ),
    Case("deepseek_v3, no name", of("deepseek_v3"), "<｜tool▁call▁begin｜>x", content="<｜tool▁call▁begin｜>x"),
    Case(
        "deepseek_v3, a call without a block before one with it",
        of("deepseek_v3"),
        f"<｜tool▁call▁begin｜>a<｜tool▁call▁end｜>\n{_DEEPSEEK % ('now', '{}')}<｜tool▁calls▁end｜>b",
        [("now", {})],
        content="<｜tool▁call▁begin｜>ab",
    ),
    Case(
        "deepseek_v3, no ends",
        of("deepseek_v3"),
        _DEEPSEEK.partition("<｜tool▁call▁end")[0] % ("now", "{}"),
        [("now", {})],
    ),
    Case(
        "deepseek_v3, the end of all calls alone",
        of("deepseek_v3"),
        (_DEEPSEEK % ("now", "{}")).replace("call▁end", "calls▁end"),
        [("now", {})],
    ),
    Case(
        "deepseek_v3, a line after the block",
        of("deepseek_v3"),
        (_DEEPSEEK % ("now", "{}")).replace("```<", "```\n<"),
        [("now", {})],
    ),
    # Llama 3.
    Case("llama3", of("llama3_json"), _LLAMA, [("get_weather", WEATHER)]),
    Case("llama3, tag", of("llama3_json"), f"<|python_tag|>{_LLAMA}", [("get_weather", WEATHER)]),
    Case(
        "llama3, two",
        of("llama3_json"),
        f'{_LLAMA}; {{"name": "now", "parameters": {{}}}}',
        [("get_weather", WEATHER), ("now", {})],
    ),
    Case(
        "llama3, type first", of("llama3_json"), '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]
    ),
    Case(
        "llama3, other JSON",
        of("llama3_json"),
        '{"name": "Ada", "parameters": 3}',
        content='{"name": "Ada", "parameters": 3}',
    ),
    Case("llama3, JSON", of("llama3_json"), '{"a": [1]} and', content='{"a": [1]} and'),
    Case("llama3, tag in text", of("llama3_json"), " It<|python_tag|> is", content=" It<|python_tag|> is"),
    Case("llama3, text", of("llama3_json"), ' It is {"name": "now"}.', content=' It is {"name": "now"}.'),
    # Mistral: a list up to version 7, then a marker for each call.
    Case(
        "mistral, list",
        of("mistral"),
        f'[TOOL_CALLS] [{_CALL}, {{"name": "now", "arguments": {{}}}}]',
        [("get_weather", WEATHER), ("now", {})],
    ),
    Case(
        "mistral, names",
        of("mistral"),
        'I look.[TOOL_CALLS]get_weather{"days": 3}[TOOL_CALLS]now{}',
        [("get_weather", {"days": 3}), ("now", {})],
        content="I look.",
    ),
    Case(
        "mistral, ids",
        of("mistral"),
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "x[TOOL_CALLS]"}',
        [("get_weather", {"city": "x[TOOL_CALLS]"})],
    ),
    Case("mistral, text", of("mistral"), "An [array].", content="An [array]."),
    # Qwen3-Coder.
    Case("qwen3_coder", of("qwen3_coder"), _CODER, [("get_weather", _CODER_ARGUMENTS)]),
    Case(
        "qwen3_coder, two",
        of("qwen3_coder"),
        f"I will.\n\n{_CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("get_weather", _CODER_ARGUMENTS), ("now", {})],
        content="I will.",
    ),
    Case(
        "qwen3_coder, lines",
        of("qwen3_coder"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\n\n  <b>2</b>\n\n</parameter>\n</function>\n"
        "</tool_call>",
        [("get_weather", {"city": "line 1\n\n  <b>2</b>\n"})],
    ),
    Case(
        "qwen3_coder, left out",
        of("qwen3_coder"),
        "<function=get_weather>\n<parameter=days>\n3\n<parameter=city>\nx\n</function>",
        [("get_weather", {"days": 3, "city": "x"})],
    ),
    # Pythonic.
    Case(
        "pythonic",
        of("pythonic"),
        "[get_weather(city='it\\'s, [x])', days=-3, metric=True, tags=['a', {'b': None}]), now()]",
        [("get_weather", {"city": "it's, [x])", "days": -3, "metric": True, "tags": ["a", {"b": None}]}), ("now", {})],
    ),
    Case("pythonic, marks", of("pythonic"), "<|python_start|>[now()]<|python_end|>", [("now", {})]),
    Case("pythonic, line", of("pythonic"), "<|python_start|>\n[now()]<|python_end|>", [("now", {})]),
    Case("pythonic, text", of("pythonic"), "[1, 2] is a list", content="[1, 2] is a list"),
    Case(
        "pythonic, names that are none in Python",
        of("pythonic"),
        '[now(from="a, b=(", max-results=3, class=[1, {"k": "v=,"}])]',
        [("now", {"from": "a, b=(", "max-results": 3, "class": [1, {"k": "v=,"}]})],
    ),
    Case("pythonic, cut", of("pythonic"), "[now(x=1", content="[now(x=1"),
    Case("pythonic, twice", of("pythonic"), "[now(from=1, from=2)]", content="[now(from=1, from=2)]"),
    Case("pythonic, other name", of("pythonic"), "[print(1)]", content="[print(1)]"),
    # gpt-oss.
    Case(
        "harmony",
        of("openai", "openai"),
        "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
        content="Hello!",
        reasoning="Hmm.",
    ),
    Case(
        "harmony, call",
        of("openai", "openai"),
        "<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"days": 3}<|call|>',
        [("get_weather", {"days": 3})],
        reasoning="Need a tool.",
    ),
    Case(
        "harmony, markers in a text",
        of("openai", "openai"),
        '<|channel|>commentary to=functions.get_weather<|message|> {"city": "<|call|>\\"{<|end|>"}<|call|>',
        [("get_weather", {"city": '<|call|>"{<|end|>'})],
    ),
    Case(
        "harmony, recipient in the role",
        of("openai"),
        " to=functions.now<|channel|>commentary json<|message|>{}",
        [("now", {})],
    ),
    Case(
        "harmony, preamble and two analyses",
        of("openai", "openai"),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        [("now", {})],
        content="I look.",
        reasoning="a\nb",
    ),
    Case(
        "harmony, calls of one turn, and a call that ends the output",
        of("openai", "openai"),
        "<|channel|>analysis<|message|>Zürich, then the time.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|><|start|>assistant"
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        [("get_weather", WEATHER), ("now", {})],
        reasoning="Zürich, then the time.",
    ),
    Case(
        "harmony, a tool of its own",
        of("openai", "openai"),
        '<|channel|>analysis to=browser.search code<|message|>{"query": "é"}<|call|><|start|>assistant<|channel|>final'
        "<|message|>Found.<|return|>",
        content="Found.",
        reasoning='{"query": "é"}',
    ),
    Case(
        "harmony, cut in a header", of("openai", "openai"), "<|channel|>analysis<|message|>a<|end|><|st", reasoning="a"
    ),
    Case("harmony, no header", of(None, "openai"), "Hello", content="Hello"),
]
