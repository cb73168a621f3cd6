"""Checks of requests, shared by the SDK and the coordinator.

``check_request`` needs only the request; ``check_against_model`` also needs the facts of a model, and is used by the
coordinator. Both raise ``InvalidRequestError``, naming the field and the valid values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider import limits
from outrider.chat import checks_of_chat
from outrider.cooperative import Work, is_long, run, slices_of
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationRequest, Resumption
from outrider.limits import MAX_DRAFT_LENGTH, MAX_LOGPROBS, MAX_SEED, MAX_TOKENS, ModelLimits
from outrider.types import PackedTokenIds, SamplingParams, are_within


def check_request(request: GenerationRequest) -> None:
    """Raise ``InvalidRequestError`` for the first field that no model could accept; lengths are checked before
    values.
    """
    run(checks_of_request(request))


def checks_of_request(request: GenerationRequest) -> Work[None]:
    """``check_request`` with pauses in long lists."""
    check_lengths(request)
    yield from _check_prompt(request)
    _check_integer("max_tokens", request.max_tokens, 1, MAX_TOKENS)
    yield from checks_of_sampling(request.sampling)
    if request.sampling.min_tokens > request.max_tokens:
        raise InvalidRequestError("min_tokens", f"must be at most max_tokens {request.max_tokens}")
    _check_grammar(request)
    _check_optional("seed", request.seed, 0, MAX_SEED)
    _check_integer("priority", request.priority, -limits.MAX_PRIORITY, limits.MAX_PRIORITY)
    _check_optional("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _check_optional("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_optional("num_speculative_tokens", request.num_speculative_tokens, 0, MAX_DRAFT_LENGTH)
    _check_texts("stop", request.stop, longest=limits.STOP_TEXT)
    _check_texts("bad_words", request.bad_words, longest=limits.BAD_WORD)
    limits.BAD_WORDS_CHARACTERS.check("bad_words", sum(map(len, request.bad_words)))
    yield from _check_ids("stop_token_ids", request.stop_token_ids)
    _check_encodable("request_id", request.request_id)
    if not request.request_id.isprintable():
        raise InvalidRequestError("request_id", "must consist of printable characters")
    _check_encodable("cache_salt", request.cache_salt)
    if request.resume is not None:
        yield from _check_resumption(request, request.resume)


def _check_grammar(request: GenerationRequest) -> None:
    grammar = request.sampling.grammar
    if grammar is None:
        return
    _check_encodable(grammar.field, grammar.text)
    _check_encodable("grammar_after", grammar.after)
    if not grammar.text:
        raise InvalidRequestError(grammar.field, "must not be empty")
    if request.ignore_eos:
        problem = f"cannot be set together with {grammar.field}, after whose end there is nothing to generate"
        raise InvalidRequestError("ignore_eos", problem)


def check_lengths(request: GenerationRequest) -> None:
    """Raise ``InvalidRequestError`` for the first list or text beyond the limits of any model."""
    limits.PROMPT_CHARACTERS.check("prompt", len(request.prompt or ""))
    limits.PROMPT_TOKENS.check("prompt_token_ids", len(request.prompt_token_ids or ()))
    limits.STOP_TEXTS.check("stop", len(request.stop))
    limits.STOP_TOKEN_IDS.check("stop_token_ids", len(request.stop_token_ids))
    limits.REQUEST_ID.check("request_id", len(request.request_id))
    limits.CACHE_SALT.check("cache_salt", len(request.cache_salt))
    sampling = request.sampling
    limits.LOGIT_BIAS.check("logit_bias", len(sampling.logit_bias))
    limits.ALLOWED_TOKEN_IDS.check("allowed_token_ids", len(sampling.allowed_token_ids))
    limits.BAD_WORDS.check("bad_words", len(request.bad_words) + len(sampling.bad_words))
    limits.BAD_WORDS_TOKENS.check("bad_words", sum(map(len, sampling.bad_words)))
    if sampling.grammar is not None:
        limits.GRAMMAR_CHARACTERS.check(sampling.grammar.field, len(sampling.grammar.text))
        limits.GRAMMAR_AFTER.check("grammar_after", len(sampling.grammar.after))
    if request.resume is not None:
        limits.EMITTED_TOKEN_IDS.check(limits.EMITTED, len(request.resume.emitted_token_ids))
        limits.MODEL_NAME.check("resume.model", len(request.resume.model))


def check_against_model(
    request: GenerationRequest, prompt_token_ids: tuple[int, ...], *, num_token_ids: int, max_model_len: int
) -> None:
    """Raise ``InvalidRequestError`` for the first field that this model cannot accept.

    ``num_token_ids``: all ids are below it. ``max_model_len``: maximum length of prompt and output together.
    """
    run(checks_against_model(request, prompt_token_ids, num_token_ids=num_token_ids, max_model_len=max_model_len))


def checks_against_model(
    request: GenerationRequest, prompt_token_ids: tuple[int, ...], *, num_token_ids: int, max_model_len: int
) -> Work[None]:
    """``check_against_model`` with pauses in long lists."""
    model, sampling = ModelLimits(num_token_ids, max_model_len), request.sampling
    if not prompt_token_ids:
        problem = "must not be empty" if request.prompt == "" else "must give at least one token"
        raise InvalidRequestError(_prompt_field(request), problem)
    model.check_prompt(_prompt_field(request), len(prompt_token_ids))
    model.check_allowed(len(sampling.allowed_token_ids))
    yield from _check_below(_prompt_field(request), prompt_token_ids, num_token_ids)
    if request.resume is not None:
        emitted = request.resume.emitted_token_ids
        model.check_emitted(len(prompt_token_ids), len(emitted))
        yield from _check_below(limits.EMITTED, emitted, num_token_ids)
    yield from _check_below("stop_token_ids", request.stop_token_ids, num_token_ids)
    yield from _check_below("logit_bias", [token_id for token_id, _ in sampling.logit_bias], num_token_ids)
    yield from _check_below("allowed_token_ids", sampling.allowed_token_ids, num_token_ids)
    yield from _check_below("bad_words", [token_id for word in sampling.bad_words for token_id in word], num_token_ids)


def _prompt_field(request: GenerationRequest) -> str:
    if request.chat is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_token_ids"


def _check_prompt(request: GenerationRequest) -> Work[None]:
    if [request.prompt, request.prompt_token_ids, request.chat].count(None) != 2:
        raise InvalidRequestError("prompt", "exactly one of prompt, prompt_token_ids and messages must be given")
    if request.chat is not None:
        yield from checks_of_chat(request.chat)
    elif request.prompt is not None:
        _check_encodable("prompt", request.prompt)
    elif not request.prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids", "must not be empty")
    else:
        yield from _check_ids("prompt_token_ids", request.prompt_token_ids)


def _check_resumption(request: GenerationRequest, resume: Resumption) -> Work[None]:
    num_emitted = len(resume.emitted_token_ids)
    if num_emitted > request.max_tokens:
        raise InvalidRequestError(limits.EMITTED, f"has {num_emitted} ids; at most max_tokens {request.max_tokens}")
    yield from _check_ids(limits.EMITTED, resume.emitted_token_ids)
    _check_encodable("resume.model", resume.model)
    if num_emitted and request.seed is None:
        raise InvalidRequestError("seed", "must be that of the interrupted generation")


def checks_of_sampling(sampling: SamplingParams) -> Work[None]:
    """Raise ``InvalidRequestError`` for the first sampling parameter that no model could accept, with pauses."""
    _check_number("temperature", sampling.temperature, at_least=0.0)
    _check_number("top_p", sampling.top_p, above=0.0, at_most=1.0)
    _check_integer("top_k", sampling.top_k, -1, MAX_TOKENS)
    _check_number("min_p", sampling.min_p, at_least=0.0, at_most=1.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, above=0.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, at_least=-2.0, at_most=2.0)
    _check_number("presence_penalty", sampling.presence_penalty, at_least=-2.0, at_most=2.0)
    _check_integer("min_tokens", sampling.min_tokens, 0, MAX_TOKENS)
    yield from _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
    for _, bias in sampling.logit_bias:
        _check_number("logit_bias", bias, at_least=-100.0, at_most=100.0)
    yield from _check_ids("allowed_token_ids", sampling.allowed_token_ids)


def _check_number(
    name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(name, f"must be a number, not {value!r}")
    if not math.isfinite(value) or value <= above or value < at_least or value > at_most:
        raise InvalidRequestError(name, f"must be {_range(above, at_least, at_most)}, not {value}")


def _range(above: float, at_least: float, at_most: float) -> str:
    bounds = []
    if math.isfinite(above):
        bounds.append(f"above {above:g}")
    if math.isfinite(at_least):
        bounds.append(f"at least {at_least:g}")
    if math.isfinite(at_most):
        bounds.append(f"at most {at_most:g}")
    return " and ".join(["finite", *bounds])


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise InvalidRequestError(name, f"must be from {least} to {most}, not {value}")


def _check_optional(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None:
        _check_integer(name, value, least, most)


def _check_ids(name: str, token_ids: Sequence[int]) -> Work[None]:
    if isinstance(token_ids, PackedTokenIds) and are_within(token_ids, 0, MAX_TOKENS):
        return
    for part in slices_of(token_ids):
        if not (_are_integers(part) and are_within(part, 0, MAX_TOKENS)):
            for token_id in part:
                _check_integer(name, token_id, 0, MAX_TOKENS)
        if is_long(token_ids):
            yield


def _check_below(name: str, token_ids: Sequence[int], num_token_ids: int) -> Work[None]:
    if isinstance(token_ids, PackedTokenIds) and are_within(token_ids, 0, num_token_ids - 1):
        return
    for part in slices_of(token_ids):
        if not are_within(part, 0, num_token_ids - 1):
            wrong = next(token_id for token_id in part if not 0 <= token_id < num_token_ids)
            raise InvalidRequestError(name, f"token id {wrong} is not from 0 to {num_token_ids - 1}")
        if is_long(token_ids):
            yield


def _are_integers(values: Iterable[object]) -> bool:
    """True if all are integers. No Python loop: a prompt may hold a million."""
    return set(map(type, values)) <= {int}


def _check_texts(name: str, texts: tuple[str, ...], *, longest: limits.Bound) -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(name, f"must be texts that are not empty, not {text!r}")
        longest.check(name, len(text))
        _check_encodable(name, text)


def _check_encodable(name: str, text: str) -> None:
    """Half of a surrogate pair is a Python string, but no text that could be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(name, f"is no Unicode text: {error.reason} at {error.start}") from None
