"""``generation.proto``: requests for generations."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence

from outrider.cooperative import Work, is_long, run, slices_of
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.generation import (
    DEFAULTABLE,
    TO_THE_END,
    GenerationRequest,
    Resumption,
)
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.transport.convert.bounds import PACKED_PROMPT, check_request_message
from outrider.transport.convert.chat import chat_reading, chat_to_proto
from outrider.transport.convert.sampling import (
    method_from_proto,
    method_to_proto,
    read_ids,
    sampling_reading,
    sampling_to_proto,
)
from outrider.types import AcceptanceMethod
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import sampling_pb2


def request_to_proto(request: GenerationRequest) -> pb.GenerateRequest:
    """Convert a request that ``outrider.requests`` has checked; ``InvalidRequestError`` for a number that does
    not fit.
    """
    return run(request_writing(request))


def request_writing(request: GenerationRequest) -> Work[pb.GenerateRequest]:
    """``request_to_proto`` with pauses in a long prompt, whose ids are packed."""
    with refusing_numbers_out_of_range():
        message = pb.GenerateRequest(
            max_tokens=request.max_tokens,
            sampling=_sampling_to_proto(request),
            bad_words=request.bad_words,
            seed=request.seed,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            include_stop_str_in_output=request.include_stop_str_in_output,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            num_speculative_tokens=request.num_speculative_tokens,
            acceptance_method=method_to_proto(request.acceptance_method),
            draft_ahead=request.draft_ahead,
            priority=request.priority,
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            resumable=request.resumable,
            resume=_resumption_to_proto(request.resume),
            add_special_tokens=request.add_special_tokens,  # type: ignore[arg-type] # None: unset
            skip_special_tokens=request.skip_special_tokens,
        )
        if request.prompt is not None:
            message.prompt_text = request.prompt
        if request.chat is not None:
            message.chat.CopyFrom(chat_to_proto(request.chat))
        if request.prompt_token_ids is not None and is_long(request.prompt_token_ids):
            message.packed_prompt_token_ids = yield from _packing(request.prompt_token_ids)
        elif request.prompt_token_ids is not None:
            message.prompt_token_ids.SetInParent()
            message.prompt_token_ids.token_ids.extend(request.prompt_token_ids)
    return message


def _packing(token_ids: tuple[int, ...]) -> Work[bytes]:
    """The ids as little-endian bytes."""
    packed = array("I")
    for part in slices_of(token_ids):
        packed.extend(part)
        yield
    return _little_endian(packed).tobytes()


def _prompt_ids(message: pb.GenerateRequest) -> Sequence[int]:
    """The ids of a prompt in either form."""
    if message.WhichOneof("prompt") != PACKED_PROMPT:
        return message.prompt_token_ids.token_ids
    return _little_endian(array("I", message.packed_prompt_token_ids))


def _little_endian(token_ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


@contextlib.contextmanager
def refusing_numbers_out_of_range() -> Iterator[None]:
    """``InvalidRequestError`` for a number that does not fit its field."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError("request", f"holds a number out of range: {error}") from error


def request_from_proto(message: pb.GenerateRequest, model: ModelLimits = ANY_MODEL) -> GenerationRequest:
    """Convert a received request; ``InvalidRequestError`` for a list or a text beyond its limit.

    ``outrider.requests`` checks the values.
    """
    return run(request_reading(message, model))


def request_reading(
    message: pb.GenerateRequest,
    model: ModelLimits = ANY_MODEL,
    *,
    read_prompt: Callable[[Sequence[int]], Work[tuple[int, ...]]] = read_ids,
) -> Work[GenerationRequest]:
    """``request_from_proto`` with pauses in long lists. ``read_prompt`` reads the ids of the prompt."""
    check_request_message(message, model)
    prompt_token_ids = yield from read_prompt(_prompt_ids(message))
    sampling = yield from sampling_reading(message.sampling)
    resume = (yield from _read_resumption(message.resume)) if message.HasField("resume") else None
    prompt = message.WhichOneof("prompt")
    chat = (yield from chat_reading(message.chat)) if prompt == "chat" else None
    adds_special = message.add_special_tokens if message.HasField("add_special_tokens") else None
    return GenerationRequest(
        prompt=message.prompt_text if prompt == "prompt_text" else None,
        prompt_token_ids=prompt_token_ids if prompt in ("prompt_token_ids", PACKED_PROMPT) else None,
        chat=chat,
        add_special_tokens=adds_special,
        skip_special_tokens=message.skip_special_tokens or not message.HasField("skip_special_tokens"),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else TO_THE_END,
        sampling=sampling,
        defaulted=frozenset(name for name in DEFAULTABLE if not message.sampling.HasField(name)),
        bad_words=tuple(message.bad_words),
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        num_speculative_tokens=message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None,
        acceptance_method=_method_of_request(message.acceptance_method),
        draft_ahead=message.draft_ahead if message.HasField("draft_ahead") else True,
        priority=message.priority,
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        resumable=message.resumable,
        resume=resume,
    )


def _sampling_to_proto(request: GenerationRequest) -> sampling_pb2.SamplingParams:
    """Message of the sampling parameters; those that are left to the server are not sent."""
    message = sampling_to_proto(request.sampling)
    for name in request.defaulted:
        message.ClearField(name)
    return message


def _resumption_to_proto(resume: Resumption | None) -> pb.Resumption | None:
    return None if resume is None else pb.Resumption(emitted_token_ids=resume.emitted_token_ids, model=resume.model)


def _read_resumption(message: pb.Resumption) -> Work[Resumption]:
    return Resumption((yield from read_ids(message.emitted_token_ids)), message.model)


def _method_of_request(number: int) -> AcceptanceMethod | None:
    try:
        return method_from_proto(number)
    except ProtocolError as error:
        raise InvalidRequestError("acceptance_method", f"{number} is not a known acceptance method") from error
