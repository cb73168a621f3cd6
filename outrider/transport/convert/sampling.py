"""``sampling.proto``: sampling parameters, methods, logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from outrider.cooperative import SLICE_ENTRIES, Work, run, slices_of
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, LogprobsMode, SamplingParams, TokenLogprob
from outrider.v1 import sampling_pb2 as pb

_DEFAULTS = SamplingParams()

_METHODS: dict[AcceptanceMethod, pb.AcceptanceMethod] = {
    AcceptanceMethod.REJECTION: pb.ACCEPTANCE_METHOD_REJECTION,
    AcceptanceMethod.COUPLED: pb.ACCEPTANCE_METHOD_COUPLED,
    AcceptanceMethod.TYPICAL: pb.ACCEPTANCE_METHOD_TYPICAL,
}
_METHODS_BACK: dict[int, AcceptanceMethod] = {number: method for method, number in _METHODS.items()}
_MODES: dict[LogprobsMode, pb.LogprobsMode] = {
    LogprobsMode.RAW: pb.LOGPROBS_MODE_RAW,
    LogprobsMode.PROCESSED: pb.LOGPROBS_MODE_PROCESSED,
}
_MODES_BACK: dict[int, LogprobsMode] = {
    pb.LOGPROBS_MODE_UNSPECIFIED: LogprobsMode.RAW,
    **{number: mode for mode, number in _MODES.items()},
}


def method_to_proto(method: AcceptanceMethod | None) -> pb.AcceptanceMethod:
    """The number of a method; None is unspecified."""
    return pb.ACCEPTANCE_METHOD_UNSPECIFIED if method is None else _METHODS[method]


def method_from_proto(number: int) -> AcceptanceMethod | None:
    """The method; None if unspecified, ``ProtocolError`` for an unknown number."""
    if number == pb.ACCEPTANCE_METHOD_UNSPECIFIED:
        return None
    if number not in _METHODS_BACK:
        raise ProtocolError(f"acceptance_method: {number} is not a known method")
    return _METHODS_BACK[number]


def mode_to_proto(mode: LogprobsMode) -> pb.LogprobsMode:
    """The number of a mode."""
    return _MODES[mode]


def mode_from_proto(number: int) -> LogprobsMode:
    """The mode; ``ProtocolError`` for an unknown number."""
    if number not in _MODES_BACK:
        raise ProtocolError(f"logprobs_mode: {number} is not a known mode")
    return _MODES_BACK[number]


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """All fields are set, so the reader's defaults do not matter."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        allowed_token_ids=params.allowed_token_ids,
        grammar=None if params.grammar is None else _grammar_to_proto(params.grammar),
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """The parameters; absent fields have their defaults."""
    return run(sampling_reading(message))


def sampling_reading(message: pb.SamplingParams) -> Work[SamplingParams]:
    """``sampling_from_proto`` with pauses in long lists."""

    def given(name: str) -> float:
        value: float = getattr(message if message.HasField(name) else _DEFAULTS, name)
        return value

    allowed = yield from read_ids(message.allowed_token_ids)
    bad_words = yield from _read_bad_words(message.bad_words)
    return SamplingParams(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=int(given("top_k")),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        min_tokens=int(given("min_tokens")),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        bad_words=bad_words,
        allowed_token_ids=allowed,
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    if grammar.kind is GrammarKind.CHOICE:
        return pb.Grammar(choice=pb.Choices(texts=json.loads(grammar.text)), after=grammar.after)
    message = pb.Grammar(after=grammar.after)
    setattr(message, grammar.kind.value, grammar.text)
    return message


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    form = message.WhichOneof("form")
    if form is None:
        raise InvalidRequestError("grammar", "must have one of json_schema, regex, choice and lark")
    if form == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts)), message.after)
    return Grammar(GrammarKind(form), getattr(message, form), message.after)


def read_ids(field: Sequence[int]) -> Work[tuple[int, ...]]:
    """The ids of a repeated field, with pauses in a long one."""
    if len(field) <= SLICE_ENTRIES:
        return tuple(field)
    token_ids: list[int] = []
    for part in slices_of(field):
        token_ids += part
        yield
    return tuple(token_ids)


def _read_bad_words(words: Iterable[pb.TokenSequence]) -> Work[tuple[tuple[int, ...], ...]]:
    read = []
    num_since = 0
    for word in words:
        read.append((yield from read_ids(word.token_ids)))
        num_since += len(read[-1])
        if num_since > SLICE_ENTRIES:
            num_since = 0
            yield
    return tuple(read)


def logprob_to_proto(logprob: TokenLogprob) -> pb.TokenLogprob:
    """The logprob of one token; its ``top`` is converted separately."""
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


def emitted_to_proto(logprobs: Iterable[TokenLogprob]) -> list[pb.PositionLogprobs]:
    """Public form: the emitted token of each position, and the most likely tokens, whose order gives the ranks."""
    return [
        pb.PositionLogprobs(
            token=logprob_to_proto(logprob),
            top=[pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top],
        )
        for logprob in logprobs
    ]


def emitted_from_proto(messages: Iterable[pb.PositionLogprobs]) -> tuple[TokenLogprob, ...]:
    """Public form: the emitted token of each position."""
    return tuple(_emitted_from_proto(message) for message in messages)


def _emitted_from_proto(message: pb.PositionLogprobs) -> TokenLogprob:
    token = message.token
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(token.token_id, token.logprob, token.rank, top)
