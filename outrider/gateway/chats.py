"""Generations of a chat request, and the form of the messages that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.client.grammars import KINDS, build_grammar
from outrider.errors import InvalidRequestError
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.options import Caller, Wanted, make_choices
from outrider.gateway.prompts import PreparedPrompt, check_length
from outrider.gateway.protocol import ChatCompletionRequest
from outrider.gateway.protocol.grammars import GrammarField
from outrider.gateway.responses.chat_messages import MessageForm
from outrider.gateway.served_model import ServedModel
from outrider.generation import TO_THE_END
from outrider.tokenization.output_parsing import NO_PARSER, AnswerGrammar, OutputFormat, choose_format

_NO_FORM = (  # clients try again without tools after "tool calling is not supported"
    "cannot be auto: tool calling is not supported, since the chat template shows no form of calls that is known; "
    "name one by --tool-call-parser, or send required, a tool or none"
)


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """Generation of a chat: the request, and the parsers of its output."""

    prompt: PreparedPrompt
    choices: Sequence[GenerationChoice]
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
    form = _message_form(model, asked, prompt, parsers)
    grammar, tokenizer = _output_grammar(model, asked, form), model.text.tokenizer
    wanted = Wanted(
        TO_THE_END if asked.wanted_tokens is None else asked.wanted_tokens,
        asked.wanted_logprobs,
        asked.prompt_logprobs,
        resume_timeout,
        grammar=grammar,
        grammar_after=form.format.reasoning_end(prompt.end),
        needs_special_tokens=tokenizer is not None and form.format.needs_special_tokens(tokenizer.is_special),
    )
    form = replace(form, has_grammar=grammar is not None)
    return ChatGeneration(prompt, make_choices(asked, [prompt], wanted, caller), form, grammar, caller.request_id)


def _output_grammar(model: ServedModel, asked: ChatCompletionRequest, form: MessageForm) -> GrammarField | None:
    """Grammar of an output in which the model may reason, and call tools: calls of those that are ``strict``, and an
    output without calls by its own grammar.
    """
    grammar, tokenizer = asked.grammar, model.text.tokenizer
    if tokenizer is None:
        return grammar
    if asked.enforced_call is not None:
        call = form.format.enforced_grammar(form.tools, asked.enforced_call)
        if call is not None:
            return GrammarField("tools", "grammar", call)
    answer = None if grammar is None else _answer(grammar)
    may_call = asked.parses_tools and asked.enforced_call is None
    found = form.format.output_grammar(
        form.tools if may_call else (), tokenizer.added_token_id, answer, form.prompt_end
    )
    return grammar if found is None else GrammarField("tools" if answer is None else answer.field, "grammar", found)


def _answer(grammar: GrammarField) -> AnswerGrammar:
    """The grammar as that of an answer; ``InvalidRequestError`` for a value of a wrong type."""
    try:
        build_grammar({grammar.option: grammar.value})
    except InvalidRequestError as error:
        raise InvalidRequestError(grammar.field, error.problem) from error
    return AnswerGrammar(grammar.value, grammar.field, KINDS[grammar.option])


def _message_form(
    model: ServedModel,
    asked: ChatCompletionRequest,
    prompt: PreparedPrompt,
    parsers: OutputFormat,
) -> MessageForm:
    template = model.text.chat.template_of(asked.chat)
    tool_call_parser = parsers.tool_call_parser if asked.parses_tools else NO_PARSER
    output_format = choose_format(template, tool_call_parser, parsers.reasoning_parser)
    chooses = asked.parses_tools and asked.enforced_call is None and parsers.tool_call_parser is None
    if chooses and output_format.tool_call_parser is None:
        raise InvalidRequestError("tool_choice", _NO_FORM)
    return MessageForm(
        output_format,
        tuple(asked.tools or ()),
        asked.enforced_call,
        prompt.end,
        includes_reasoning=asked.include_reasoning is not False,
        max_calls=1 if asked.parallel_tool_calls is False else None,
    )
