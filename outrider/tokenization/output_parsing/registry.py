"""Parsers by the names that vLLM gives them, and the format of a model by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.tokenization.output_parsing.deepseek_v3 import CALL_NAME, CALLS_BEGIN, DeepSeekV3Parser
from outrider.tokenization.output_parsing.enforced import CallListParser, NamedCallParser
from outrider.tokenization.output_parsing.events import OutputParser
from outrider.tokenization.output_parsing.harmony import HarmonyParser
from outrider.tokenization.output_parsing.hermes import HermesParser
from outrider.tokenization.output_parsing.llama3_json import Llama3JsonParser
from outrider.tokenization.output_parsing.mistral import MistralParser
from outrider.tokenization.output_parsing.pythonic import PythonicParser
from outrider.tokenization.output_parsing.qwen3_coder import Qwen3CoderParser
from outrider.tokenization.output_parsing.reasoned_answers import answer_grammar, channel_grammar, thinking_grammar
from outrider.tokenization.output_parsing.reasoning import THINK_CLOSE, THINK_OPEN, ContentParser, ThinkParser
from outrider.tokenization.output_parsing.schema_types import parameters_of
from outrider.tokenization.output_parsing.strict_calls import (
    AnswerGrammar,
    TokenId,
    enforced_channel_call,
    strict_calls_grammar,
)
from outrider.tokenization.output_parsing.trimming import TrimmingParser

NO_PARSER = "none"
_HARMONY = "openai"
_OF_TOOLS = {
    "openai": ("<|channel|>", "<|start|>"),
    "qwen3_coder": ("<function=", "<parameter="),
    "hermes": ("<tool_call>", '"name"', '"arguments"'),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": (CALLS_BEGIN, CALL_NAME, "```json"),
    "pythonic": ("<|python_start|>",),
    "llama3_json": ('"parameters"', "ipython"),
}
"""Texts that a template of a format contains, all of them; the first format that fits is the template's."""
_IN_TAGS = {"hermes": ("{",), "qwen3_coder": ("<function=",)}
"""Beginnings of calls after ``<tool_call>``."""
_OF_REASONING = {"openai": ("<|channel|>", "<|start|>"), "qwen3": ("</think>",)}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Parsers of a model's output by name; None parses nothing."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def needs_special_tokens(self, is_special: Callable[[str], bool]) -> bool:
        """True if the parsers need the text of special tokens. ``is_special`` tells those of the tokenizer."""
        thinks = self.reasoning_parser in ("deepseek_r1", "qwen3")
        has_tags = self.tool_call_parser in ("hermes", "qwen3_coder")
        marks_calls = self.tool_call_parser == "deepseek_v3"
        tags = (
            *((THINK_OPEN, THINK_CLOSE) if thinks else ()),
            *(("<tool_call>",) if has_tags else ()),
            *((CALLS_BEGIN,) if marks_calls else ()),
        )
        return self.has_channels or self.tool_call_parser == "mistral" or any(map(is_special, tags))

    @property
    def has_channels(self) -> bool:
        """True if reasoning, calls and content are messages on channels."""
        return _HARMONY in (self.tool_call_parser, self.reasoning_parser)

    @property
    def call_id_length(self) -> int | None:
        """Length of ids of calls that the model's template requires; None for any."""
        return 9 if self.tool_call_parser == "mistral" else None

    def reasoning_end(self, prompt_end: str) -> str:
        """Text that ends the reasoning of an output that certainly begins with it; empty for any other."""
        prompt_end = prompt_end.rstrip()
        assumed = self.reasoning_parser == "deepseek_r1" and not prompt_end.endswith(THINK_CLOSE)
        opened = self.reasoning_parser in ("deepseek_r1", "qwen3") and prompt_end.endswith(THINK_OPEN)
        return THINK_CLOSE if assumed or opened else ""

    def may_reason(self, prompt_end: str) -> bool:
        """True if an output may begin with reasoning that the prompt has not opened."""
        is_open = not prompt_end.rstrip().endswith((THINK_OPEN, THINK_CLOSE))
        return self.reasoning_parser == _HARMONY or (self.reasoning_parser == "qwen3" and is_open)

    def make_parser(self, tools: object, prompt_end: str, *, has_grammar: bool = False) -> OutputParser | None:
        """A parser for one output; None if nothing is parsed. ``tools``: those of the request, as JSON. A call ends the
        reasoning that it is in, unless the output ``has_grammar``, which begins after ``</think>``.
        """
        if self.tool_call_parser is None and self.reasoning_parser is None:
            return None
        if self.has_channels:
            return TrimmingParser(HarmonyParser())
        found = self._make_tool_parser(parameters_of(tools))
        if self.reasoning_parser is not None:
            calls = () if has_grammar else _IN_TAGS.get(self.tool_call_parser or "", ())
            found = ThinkParser(found, prompt_end, is_assumed=self.reasoning_parser == "deepseek_r1", calls=calls)
        return TrimmingParser(found)

    def enforced_parser(self, name: str, prompt_end: str) -> OutputParser:
        """A parser for an output whose grammar enforces a call of the tool ``name``, or a list of calls without one."""
        if self.has_channels:
            return TrimmingParser(HarmonyParser())
        found: OutputParser = NamedCallParser(name) if name else CallListParser()
        if (ends := bool(self.reasoning_end(prompt_end))) or self.may_reason(prompt_end):
            found = ThinkParser(found, prompt_end, is_assumed=ends)
        return TrimmingParser(found)

    def enforced_grammar(self, tools: Sequence[Mapping[str, Any]], name: str) -> str | None:
        """A grammar in the model's own form that enforces a call of the tool ``name``, or of any without one; None if
        calls are enforced in a form of ours.
        """
        return enforced_channel_call(tools, name) if self.has_channels else None

    def output_grammar(
        self, tools: object, token_id: TokenId, answer: AnswerGrammar | None = None, prompt_end: str = ""
    ) -> str | None:
        """A grammar under which calls match the schemas of tools that are ``strict``, and an output without calls the
        ``answer``; None if there is neither, or if no form of calls is known. Reasoning may come first, if this is a
        format with reasoning and ``prompt_end`` has not ended it.
        """
        given = [tool for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list | tuple) else []
        found = strict_calls_grammar(self.tool_call_parser, given, token_id, answer)
        if not self.may_reason(prompt_end):
            return found
        has_channels = self.reasoning_parser == _HARMONY
        if found is None and answer is not None:
            found = channel_grammar(answer) if has_channels else answer_grammar(answer)
        return found if found is None or has_channels else thinking_grammar(found, token_id)

    def _make_tool_parser(self, parameters: Mapping[str, Mapping[str, Any]]) -> OutputParser:
        if self.tool_call_parser == "hermes":
            return HermesParser()
        if self.tool_call_parser == "deepseek_v3":
            return DeepSeekV3Parser()
        if self.tool_call_parser == "llama3_json":
            return Llama3JsonParser(parameters.__contains__)
        if self.tool_call_parser == "mistral":
            return MistralParser()
        if self.tool_call_parser == "pythonic":
            return PythonicParser(parameters.__contains__)
        if self.tool_call_parser == "qwen3_coder":
            return Qwen3CoderParser(parameters)
        return ContentParser()


UNNAMED = OutputFormat()


def choose_format(
    template: str, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormat:
    """The format of a model by its chat template; a name that is given goes first, ``none`` parses nothing."""
    template = template.replace('\\"', '"')  # as in a string of the template
    tools = _first(_OF_TOOLS, template) if tool_call_parser is None else tool_call_parser
    reasoning = _first(_OF_REASONING, template) if reasoning_parser is None else reasoning_parser
    return OutputFormat(_named(tools), _named(reasoning))


def _first(known: Mapping[str, tuple[str, ...]], template: str) -> str | None:
    return next((name for name, texts in known.items() if all(text in template for text in texts)), None)


def _named(name: str | None) -> str | None:
    return None if name == NO_PARSER else name
