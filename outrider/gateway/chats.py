"""Generations of a chat request, and the form of the messages that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.gateway.generations import Choice
from outrider.gateway.options import Caller, Wanted, make_choices
from outrider.gateway.prompts import PreparedPrompt, check_length
from outrider.gateway.protocol import ChatCompletionRequest
from outrider.gateway.protocol.grammars import GrammarField
from outrider.gateway.responses.chat_messages import MessageForm
from outrider.gateway.served_model import ServedModel
from outrider.generation import TO_THE_END
from outrider.tokenization.output_parsing import NO_PARSER, OutputFormat, choose_format


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """Generation of a chat: the request, and the parsers of its output."""

    prompt: PreparedPrompt
    choices: Sequence[Choice]
    form: MessageForm
    grammar: GrammarField | None
    request_id: str


def plan_chat(
    model: ServedModel,
    asked: ChatCompletionRequest,
    prompt: PreparedPrompt,
    caller: Caller,
    *,
    parsers: OutputFormat,
    resume_timeout: float,
) -> ChatGeneration:
    """The generations of a chat with a rendered prompt; ``InvalidRequestError`` for one that is too long.

    ``parsers``: names that go before the ones that the chat template suggests.
    """
    check_length(model, prompt, asked.wanted_tokens, prompt_field="messages", tokens_field=asked.tokens_field)
    grammar = asked.grammar
    form = _message_form(model, asked, prompt, parsers, is_constrained=grammar is not None)
    if grammar is None and asked.parses_tools:
        grammar = _strict_calls(model, form)
    wanted = Wanted(
        TO_THE_END if asked.wanted_tokens is None else asked.wanted_tokens,
        asked.wanted_logprobs,
        asked.prompt_logprobs,
        resume_timeout,
        grammar=grammar,
        grammar_after=form.format.reasoning_end(prompt.end),
        needs_special_tokens=form.format.needs_special_tokens,
    )
    return ChatGeneration(prompt, make_choices(asked, [prompt], wanted, caller), form, grammar, caller.request_id)


def _strict_calls(model: ServedModel, form: MessageForm) -> GrammarField | None:
    """Grammar of calls that the model may make, of tools that are ``strict``."""
    tokenizer = model.text.tokenizer
    if tokenizer is None:
        return None
    found = form.format.strict_calls_grammar(form.tools, tokenizer.special_token_id)
    return None if found is None else GrammarField("tools", "grammar", found)


def _message_form(
    model: ServedModel,
    asked: ChatCompletionRequest,
    prompt: PreparedPrompt,
    parsers: OutputFormat,
    *,
    is_constrained: bool,
) -> MessageForm:
    template = model.text.chat.template_of(asked.chat)
    tool_call_parser = parsers.tool_call_parser if asked.parses_tools else NO_PARSER
    output_format = choose_format(template, tool_call_parser, parsers.reasoning_parser)
    if is_constrained and not output_format.reasoning_end(prompt.end):
        output_format = replace(output_format, reasoning_parser=None)  # there is none before what has to match
    return MessageForm(
        output_format,
        tuple(asked.tools or ()),
        asked.enforced_call,
        prompt.end,
        includes_reasoning=asked.include_reasoning is not False,
        max_calls=1 if asked.parallel_tool_calls is False else None,
    )
