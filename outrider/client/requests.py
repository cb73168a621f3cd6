"""``GenerationRequest`` made from keyword arguments: the only place that names the SDK's parameters.

Owns names, defaults and accepted types. ``outrider.requests`` checks the values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Annotated, Any, TypedDict

from annotated_doc import Doc

from outrider.client.chats import build_chat
from outrider.client.grammars import build_grammar
from outrider.cooperative import SLICE_ENTRIES, Work, is_long, run, slices_of
from outrider.errors import InvalidRequestError
from outrider.generation import DEFAULTABLE, TO_THE_END, GenerationRequest
from outrider.requests import checks_of_request
from outrider.telemetry.tracing.context import TraceContext, active_context
from outrider.types import AcceptanceMethod, SamplingParams

DEFAULT_RESUME_TIMEOUT_S = 60.0
"""Time for which an interrupted stream is tried again: a restart of a coordinator takes a few seconds."""
_MAX_TIMEOUT_S = 365 * 24 * 3600
"""A longer deadline would overflow."""


class GenerateOptions(TypedDict, total=False):
    """Options of ``generate`` and ``stream``; absent options have the defaults of vLLM, or of the server."""

    prompt: Annotated[str | None, Doc("Text to go on from; this or `prompt_token_ids`.")]
    prompt_token_ids: Annotated[Sequence[int] | None, Doc("Token ids to go on from, taken as they are.")]
    messages: Annotated[
        Sequence[Mapping[str, Any]] | None,
        Doc('A conversation for the model\'s chat template: `{"role": "user", "content": "..."}`, oldest first.'),
    ]
    tools: Annotated[
        Sequence[Mapping[str, Any]] | None,
        Doc("JSON schemas of functions that the chat template may tell the model of."),
    ]
    documents: Annotated[Sequence[Mapping[str, Any]] | None, Doc("Documents for chat templates that know retrieval.")]
    chat_template: Annotated[str | None, Doc("Name of one of the model's templates; None is the one for chats.")]
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, Doc("Further variables of the chat template.")]
    add_generation_prompt: Annotated[
        bool,
        Doc("End the prompt with the header of the assistant's message, True unless the last message is continued."),
    ]
    continue_final_message: Annotated[bool, Doc("Leave the last message open and continue it, False.")]
    add_special_tokens: Annotated[
        bool,
        Doc(
            "Put special tokens such as the beginning of sequence around the prompt; True for a text, False "
            "for messages."
        ),
    ]
    skip_special_tokens: Annotated[bool, Doc("Leave special tokens out of the text, True.")]
    max_tokens: Annotated[int | None, Doc("Most tokens to generate; None is up to the end of the model's context.")]
    min_tokens: Annotated[int, Doc("Number of tokens before which end and stop tokens are banned, 0.")]
    temperature: Annotated[
        float | None,
        Doc(
            "0 is greedy; None is the model's own default, else 1. The model's defaults are in its "
            "generation_config.json."
        ),
    ]
    top_p: Annotated[float | None, Doc("Nucleus mass in (0, 1]; 1 is off. None is the model's own default, else 1.")]
    top_k: Annotated[
        int | None,
        Doc("How many of the likeliest tokens are kept; 0 and -1 keep all. None is the model's own default, else 0."),
    ]
    min_p: Annotated[
        float | None,
        Doc("Tokens below this share of the largest probability are dropped. None is the model's own default, else 0."),
    ]
    repetition_penalty: Annotated[
        float | None,
        Doc("Above 1 discourages tokens already seen. None is the model's own default, else 1."),
    ]
    frequency_penalty: Annotated[float, Doc("Per occurrence in the output, from -2 to 2; 0 is off.")]
    presence_penalty: Annotated[float, Doc("Once for a token in the output, from -2 to 2; 0 is off.")]
    logit_bias: Annotated[Mapping[int, float] | None, Doc("Added to single logits, from -100 to 100.")]
    bad_words: Annotated[Sequence[str] | None, Doc("Words that may not be completed.")]
    allowed_token_ids: Annotated[Sequence[int] | None, Doc("The only tokens that may be drawn; at least one.")]
    json_schema: Annotated[
        Mapping[str, Any] | str | type | None,
        Doc("Schema that the output, which is JSON, keeps to: an object, its text, or a pydantic model."),
    ]
    regex: Annotated[str | None, Doc("Regular expression that the whole output matches.")]
    choice: Annotated[Sequence[str] | None, Doc("Texts, one of which is the output.")]
    grammar_after: Annotated[
        str | None, Doc("Text, such as the end of reasoning, after which the output has to match; None is at once.")
    ]
    grammar: Annotated[str | None, Doc("Grammar in the form of Lark or llama.cpp that the output matches.")]
    seed: Annotated[
        int | None,
        Doc(
            "Keys every random stream; random when None, and returned in the result. With acceptance_method "
            '"coupled" it repeats the output; with "rejection" and "typical" only for the same draft lengths, which '
            "follow the load by default. In 16 bits near ties depend on the batch, unless the target is "
            "batch-invariant (model_info().target_placement.batch_invariant), and with rejection and typical the "
            "draft. Restarts keep the output, other types of GPUs do not."
        ),
    ]
    stop: Annotated[str | Sequence[str] | None, Doc("Texts that end the generation.")]
    stop_token_ids: Annotated[Sequence[int] | None, Doc("Tokens that end the generation.")]
    ignore_eos: Annotated[bool, Doc("Go on past ends of sequence, False.")]
    include_stop_str_in_output: Annotated[bool, Doc("Keep the text that stopped the generation, False.")]
    logprobs: Annotated[
        int | None, Doc("Number of most likely tokens with logprobs, besides the output; None computes nothing.")
    ]
    prompt_logprobs: Annotated[int | None, Doc("The same for the prompt.")]
    num_speculative_tokens: Annotated[
        int | None,
        Doc("Maximum draft length of this request; 0 turns speculation off, None is the server's."),
    ]
    acceptance_method: Annotated[
        AcceptanceMethod | str | None,
        Doc('"rejection", "coupled" or "typical"; None is the server\'s.'),
    ]
    draft_ahead: Annotated[
        bool,
        Doc("Let draft and target begin steps before they are asked for, where the server does, True."),
    ]
    priority: Annotated[
        int,
        Doc("Place in the queue of a server with scheduling_policy priority: lower is earlier, 0."),
    ]
    timeout: Annotated[float | None, Doc("Seconds until `DeadlineError`, over all attempts; None waits for ever.")]
    resume: Annotated[
        bool,
        Doc(
            "After an interruption (a server that restarts, a connection that breaks) go on where it was, "
            "there or at the next address, False. A server that is not there yet is waited for too."
        ),
    ]
    resume_timeout: Annotated[
        float,
        Doc(
            "Seconds that may pass until a server takes the generation up again, 60; then the interruption is an error."
        ),
    ]
    trace_parent: Annotated[
        str | None,
        Doc("The caller's span as W3C's `traceparent`; None is OpenTelemetry's active span, where there is one."),
    ]
    trace_state: Annotated[str | None, Doc("W3C's `tracestate` of that span, handed on as it is.")]
    cache_salt: Annotated[
        str | None,
        Doc(
            "Names who may share cached work on prompts: requests of different salts share nothing; at most "
            "256 characters."
        ),
    ]
    request_id: Annotated[str | None, Doc("Names the request in logs, traces and the result; made up when None.")]
    max_retries: Annotated[
        int,
        Doc(
            "How often a server without room (`CapacityError`) is asked again, each time after the pause that it "
            "hints at, 0."
        ),
    ]
    best_of: Annotated[int | None, Doc("Not offered.")]
    use_beam_search: Annotated[bool, Doc("Not offered.")]


DEFAULTS: Mapping[str, object] = {
    "continue_final_message": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "draft_ahead": True,
    "priority": 0,
    "resume": False,
    "resume_timeout": DEFAULT_RESUME_TIMEOUT_S,
    "max_retries": 0,
    "use_beam_search": False,
}
"""Defaults of the options that cannot be None, for ``help()``. Those of two options depend on others."""


_INSTEAD = {
    "model": "a coordinator serves one model",
    "sampling_params": "its fields are options here, such as temperature=0.8, max_tokens=64",
    "stream": "the method stream() yields deltas",
    "text": "the prompt is given by its place, or as prompt",
}
"""Options of other clients: what there is instead."""


def build_request(options: GenerateOptions) -> tuple[GenerationRequest, float | None]:
    """Return the checked request and its timeout in seconds; ``InvalidRequestError`` names the invalid option."""
    return run(building(options))


def has_long_list(options: GenerateOptions) -> bool:
    """True if checking a list of token ids takes milliseconds."""
    lists = (options.get("prompt_token_ids"), options.get("allowed_token_ids"))
    return any(isinstance(token_ids, Sized) and len(token_ids) > 2 * SLICE_ENTRIES for token_ids in lists)


def building(options: GenerateOptions) -> Work[tuple[GenerationRequest, float | None]]:
    """``build_request`` with pauses in long lists."""
    _refuse_unknown(options)
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    _refuse_what_is_not_offered(given)
    timeout = _take_timeout(given)
    resume_timeout(options)
    max_retries(options)
    trace = _trace(_text("trace_parent", given.get("trace_parent")), _text("trace_state", given.get("trace_state")))
    prompt_token_ids = yield from _token_ids("prompt_token_ids", given.get("prompt_token_ids"))
    stop_token_ids = yield from _token_ids("stop_token_ids", given.get("stop_token_ids"))
    allowed = yield from _token_ids("allowed_token_ids", given.get("allowed_token_ids"))
    request = GenerationRequest(
        prompt=_text("prompt", given.get("prompt")),
        prompt_token_ids=prompt_token_ids,
        chat=build_chat(given),
        add_special_tokens=_flag("add_special_tokens", given) if "add_special_tokens" in given else None,
        skip_special_tokens=_flag("skip_special_tokens", given, default=True),
        max_tokens=given.get("max_tokens", TO_THE_END),
        sampling=_sampling(given, allowed),
        defaulted=frozenset(name for name in DEFAULTABLE if name not in given),
        bad_words=_texts("bad_words", given.get("bad_words", ())),
        seed=given.get("seed"),
        stop=_texts("stop", given.get("stop", ())),
        stop_token_ids=stop_token_ids or (),
        ignore_eos=_flag("ignore_eos", given),
        include_stop_str_in_output=_flag("include_stop_str_in_output", given),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        num_speculative_tokens=given.get("num_speculative_tokens"),
        acceptance_method=_method(given.get("acceptance_method")),
        draft_ahead=_flag("draft_ahead", given, default=True),
        priority=given.get("priority", 0),
        request_id=_text("request_id", given.get("request_id")) or "",
        cache_salt=_text("cache_salt", given.get("cache_salt")) or "",
        trace_parent=trace.trace_parent if trace else "",
        trace_state=trace.state if trace else "",
    )
    yield from checks_of_request(request)
    return request, timeout


def resume_timeout(options: GenerateOptions) -> float | None:
    """Maximum duration of an interruption in seconds; None: the generation is not resumed.

    Raises ``InvalidRequestError`` for anything but a positive number.
    """
    given = {key: value for key, value in options.items() if value is not None}
    seconds = _seconds("resume_timeout", given.get("resume_timeout", DEFAULT_RESUME_TIMEOUT_S))
    return seconds if _flag("resume", given) else None


def max_retries(options: GenerateOptions) -> int:
    """Number of retries after a refusal for lack of room; ``InvalidRequestError`` for anything but a whole number."""
    value = options.get("max_retries") or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequestError("max_retries", f"must be a whole number, 0 or more, not {value!r}")
    return value


def _refuse_unknown(options: Mapping[str, object]) -> None:
    """Raise a ``TypeError``, as Python does for unknown keyword arguments, with the nearest name."""
    known = [*GenerateOptions.__annotations__, "n"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else hint
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")


def _sampling(given: Mapping[str, Any], allowed: tuple[int, ...] | None) -> SamplingParams:
    plain = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "min_tokens",
    )
    return SamplingParams(
        **{name: given[name] for name in plain if name in given},
        logit_bias=_logit_bias(given.get("logit_bias", {})),
        allowed_token_ids=_allowed(allowed),
        grammar=build_grammar(given),
    )


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:  # noqa: ANN401 - a user's value
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", f"must map token ids to numbers, not be {value!r}")
    return tuple(value.items())


def _allowed(token_ids: tuple[int, ...] | None) -> tuple[int, ...]:
    if token_ids is not None and not token_ids:
        raise InvalidRequestError("allowed_token_ids", "must hold at least one id, or be left out to allow all")
    return token_ids or ()


def _trace(trace_parent: str | None, trace_state: str | None) -> TraceContext | None:
    if trace_parent is None:
        return active_context()
    context = TraceContext.parse(trace_parent, trace_state or "")
    if context is None:
        raise InvalidRequestError(
            "trace_parent", f"must be a W3C traceparent, 00-<32 hex digits>-<16>-<2>, not {trace_parent!r}"
        )
    return context


def _method(value: AcceptanceMethod | str | None) -> AcceptanceMethod | None:
    if value is None:
        return None
    try:
        return AcceptanceMethod(value)
    except ValueError:
        names = ", ".join(AcceptanceMethod)
        raise InvalidRequestError("acceptance_method", f"must be one of {names}, not {value!r}") from None


def _token_ids(name: str, value: Any) -> Work[tuple[int, ...] | None]:  # noqa: ANN401 - a user's value
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(name, f"must be a list of token ids, not {value!r}")
    entries: Sequence[Any] = value if isinstance(value, list | tuple) else tuple(value)
    are_plain = True
    for part in slices_of(entries):
        are_plain = are_plain and set(map(type, part)) <= {int}  # nearly always, and far faster
        if is_long(entries):
            yield
    if are_plain:
        return tuple(entries)  # a tuple is not copied
    token_ids: list[int] = []
    for part in slices_of(entries):
        token_ids += map(_plain_integer, part)
        if is_long(entries):
            yield
    return tuple(token_ids)


def _plain_integer(value: Any) -> Any:  # noqa: ANN401 - a user's value
    """Convert integers of numpy and torch; other values are left to the checks."""
    if isinstance(value, int) or not hasattr(value, "__index__"):
        return value
    return value.__index__()


def _texts(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401 - a user's value
    if isinstance(value, str):
        return (value,)
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(name, f"must be a text or a list of texts, not {value!r}")
    return tuple(value)


def _text(name: str, value: Any) -> str | None:  # noqa: ANN401 - a user's value
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(name, f"must be a text, not {type(value).__name__}")
    return value


def _flag(name: str, given: Mapping[str, Any], *, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be True or False, not {value!r}")
    return value


def _take_timeout(given: dict[str, Any]) -> float | None:
    timeout = given.pop("timeout", None)
    return None if timeout is None else _seconds("timeout", timeout)


def _seconds(name: str, value: Any) -> float:  # noqa: ANN401 - a user's value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_TIMEOUT_S:
        raise InvalidRequestError(
            name, f"must be a number of seconds above 0 and at most {_MAX_TIMEOUT_S}, not {value!r}"
        )
    return float(value)


def _refuse_what_is_not_offered(given: dict[str, Any]) -> None:
    if given.pop("n", 1) != 1:
        raise InvalidRequestError("n", "only generate() takes more than 1: a stream and a chat have one answer")
    if given.pop("best_of", 1) != 1:
        raise InvalidRequestError("best_of", "is not supported; send several requests and choose")
    if given.pop("use_beam_search", False):
        raise InvalidRequestError("use_beam_search", "beam search is not offered")
