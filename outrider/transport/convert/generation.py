"""``generation.proto``: deltas, results, facts of the models."""

from __future__ import annotations

from outrider.errors import ProtocolError
from outrider.generation import (
    DEFAULTABLE,
    Delta,
    GenerationResult,
    ModelInfo,
    ModelPlacement,
    Progress,
    SpeculationStats,
    StageTimes,
    Started,
    Timing,
    TokenizerFiles,
    Usage,
)
from outrider.transport.convert.sampling import (
    emitted_from_proto,
    emitted_to_proto,
    method_from_proto,
    method_to_proto,
)
from outrider.types import FinishReason, TokenLogprob
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import sampling_pb2

_REASONS: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_REASONS_BACK: dict[int, FinishReason] = {number: reason for reason, number in _REASONS.items()}


def result_to_proto(result: GenerationResult) -> pb.GenerationResult:
    """A result."""
    message = pb.GenerationResult(
        text=result.text,
        token_ids=result.token_ids,
        finish_reason=_REASONS[result.finish_reason],
        logprobs=emitted_to_proto(result.logprobs or ()),
        prompt_logprobs=emitted_to_proto(filter(None, result.prompt_logprobs or ())),
        usage=pb.Usage(
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            cached_prompt_tokens=result.usage.cached_prompt_tokens,
        ),
        speculation=_speculation_to_proto(result.speculation),
        seed=result.seed,
        request_id=result.request_id,
        timing=_timing_to_proto(result.timing),
        trace_id=result.trace_id,
        has_logprobs=result.logprobs is not None,
        has_prompt_logprobs=result.prompt_logprobs is not None,
    )
    if isinstance(result.matched_stop, str):
        message.matched_stop_text = result.matched_stop
    elif result.matched_stop is not None:
        message.matched_stop_token_id = result.matched_stop
    return message


def result_from_proto(message: pb.GenerationResult) -> GenerationResult:
    """A result; ``ProtocolError`` if it has no finish reason."""
    if message.finish_reason not in _REASONS_BACK:
        raise ProtocolError(f"finish_reason: {message.finish_reason} is not a known reason")
    matched = message.WhichOneof("matched_stop")
    return GenerationResult(
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_REASONS_BACK[message.finish_reason],
        matched_stop=None if matched is None else getattr(message, matched),
        logprobs=emitted_from_proto(message.logprobs) if message.has_logprobs else None,
        prompt_logprobs=_prompt_logprobs(message) if message.has_prompt_logprobs else None,
        usage=Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_prompt_tokens),
        speculation=_speculation_from_proto(message.speculation),
        seed=message.seed,
        request_id=message.request_id,
        timing=_timing_from_proto(message.timing),
        trace_id=message.trace_id,
    )


def _prompt_logprobs(message: pb.GenerationResult) -> tuple[TokenLogprob | None, ...]:
    """The first prompt token has none, and none is sent for it."""
    return (None, *emitted_from_proto(message.prompt_logprobs))


def _speculation_to_proto(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_steps=stats.num_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_judged_tokens=stats.num_judged_tokens,
        acceptance_histogram=stats.acceptance_histogram,
        mean_acceptance_length=stats.mean_acceptance_length,
        num_forced_tokens=stats.num_forced_tokens,
        num_accepted_forced_tokens=stats.num_accepted_forced_tokens,
    )


def _speculation_from_proto(message: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        num_steps=message.num_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_judged_tokens=message.num_judged_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
        mean_acceptance_length=message.mean_acceptance_length,
        num_forced_tokens=message.num_forced_tokens,
        num_accepted_forced_tokens=message.num_accepted_forced_tokens,
    )


_OWN_TIMES = tuple(name for name in Timing.__slots__ if name not in ("prefill", "num_drafts_ahead"))


def _timing_to_proto(timing: Timing) -> pb.Timing:
    prefill = pb.StageTimes(**{f"{name}_s": getattr(timing.prefill, name) for name in StageTimes.__slots__})
    times = {f"{name}_s": getattr(timing, name) for name in _OWN_TIMES}
    return pb.Timing(prefill=prefill, num_drafts_ahead=timing.num_drafts_ahead, **times)


def _timing_from_proto(message: pb.Timing) -> Timing:
    prefill = StageTimes(**{name: getattr(message.prefill, f"{name}_s") for name in StageTimes.__slots__})
    times = {name: getattr(message, f"{name}_s") for name in _OWN_TIMES}
    return Timing(prefill=prefill, num_drafts_ahead=message.num_drafts_ahead, **times)


def delta_to_proto(delta: Delta) -> pb.StreamGenerateResponse:
    """New output without the result, which is a separate message."""
    message = pb.StreamGenerateResponse()
    own = message.delta  # filled in field by field: with each token of each stream, and mostly two fields
    if delta.text:
        own.text = delta.text
    own.token_ids.extend(delta.token_ids)
    if delta.logprobs is not None:
        own.logprobs.extend(emitted_to_proto(delta.logprobs))
        own.has_logprobs = True
    if delta.progress is not None:
        own.progress.CopyFrom(_progress_to_proto(delta.progress))
    own.SetInParent()
    return message


def delta_from_proto(message: pb.Delta) -> Delta:
    """New output."""
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=emitted_from_proto(message.logprobs) if message.has_logprobs else None,
        progress=_progress_from_proto(message.progress) if message.HasField("progress") else None,
    )


def _progress_to_proto(progress: Progress) -> pb.Progress:
    return pb.Progress(
        speculation=_speculation_to_proto(progress.speculation), timing=_timing_to_proto(progress.timing)
    )


def _progress_from_proto(message: pb.Progress) -> Progress:
    return Progress(_speculation_from_proto(message.speculation), _timing_from_proto(message.timing))


def started_to_proto(started: Started) -> pb.StreamGenerateResponse:
    """The first message of a resumable stream."""
    message = pb.Started(
        seed=started.seed,
        max_tokens=started.max_tokens,
        acceptance_method=method_to_proto(started.acceptance_method),
        request_id=started.request_id,
        model=started.model,
        num_emitted_tokens=started.num_emitted_tokens,
        sampling=sampling_pb2.SamplingParams(**dict(started.sampling)),  # type: ignore[arg-type] # numbers of any field
    )
    if started.prompt_token_ids is not None:
        message.prompt_token_ids.token_ids.extend(started.prompt_token_ids)
        message.prompt_token_ids.SetInParent()
    return pb.StreamGenerateResponse(started=message)


def started_from_proto(message: pb.Started) -> Started:
    """Convert ``Started``; ``ProtocolError`` for an unknown acceptance method."""
    method = method_from_proto(message.acceptance_method)
    if method is None:
        raise ProtocolError("started.acceptance_method: must be said")
    has_prompt = message.HasField("prompt_token_ids")
    return Started(
        seed=message.seed,
        prompt_token_ids=tuple(message.prompt_token_ids.token_ids) if has_prompt else None,
        max_tokens=message.max_tokens,
        acceptance_method=method,
        request_id=message.request_id,
        model=message.model,
        num_emitted_tokens=message.num_emitted_tokens,
        sampling={name: getattr(message.sampling, name) for name in DEFAULTABLE if message.sampling.HasField(name)},
    )


def first_delta(started: Started) -> Delta:
    """The delta with ``Started`` and without output."""
    return Delta(text="", token_ids=(), started=started)


def last_delta(result: GenerationResult) -> Delta:
    """The delta with the result and without new output."""
    return Delta(text="", token_ids=(), logprobs=None if result.logprobs is None else (), result=result)


def tokenizer_to_proto(found: TokenizerFiles) -> pb.GetTokenizerResponse:
    """Files of a tokenizer."""
    files = [pb.ModelFile(name=name, content=content) for name, content in found.files.items()]
    return pb.GetTokenizerResponse(files=files, bos_token_id=found.bos_token_id, sha256=found.sha256)


def tokenizer_from_proto(message: pb.GetTokenizerResponse) -> TokenizerFiles:
    """Files of a tokenizer."""
    bos_token_id = message.bos_token_id if message.HasField("bos_token_id") else None
    return TokenizerFiles({file.name: file.content for file in message.files}, bos_token_id, message.sha256)


def info_to_proto(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Facts about the served models."""
    values = {name: getattr(info, name) for name in ModelInfo.__slots__}
    values |= {name: _placement_to_proto(getattr(info, name)) for name in _PLACEMENTS}
    return pb.GetModelInfoResponse(**{**values, "acceptance_method": method_to_proto(info.acceptance_method)})


def info_from_proto(message: pb.GetModelInfoResponse) -> ModelInfo:
    """Facts about the served models; ``ProtocolError`` for an unknown acceptance method."""
    method = method_from_proto(message.acceptance_method)
    if method is None:
        raise ProtocolError("acceptance_method: must be said")
    values = {name: getattr(message, name) for name in ModelInfo.__slots__}
    values |= {name: _placement_from_proto(getattr(message, name)) for name in _PLACEMENTS}
    values |= {name: tuple(getattr(message, name)) for name in ("eos_token_ids", "tensor_planes")}
    return ModelInfo(**{**values, "acceptance_method": method})


_PLACEMENTS = ("target_placement", "draft_placement")


def _placement_to_proto(placement: ModelPlacement) -> pb.ModelPlacement:
    return pb.ModelPlacement(**{name: getattr(placement, name) for name in ModelPlacement.__slots__})


def _placement_from_proto(message: pb.ModelPlacement) -> ModelPlacement:
    values = {name: getattr(message, name) for name in ModelPlacement.__slots__}
    return ModelPlacement(**{**values, "tensor_parallel_size": message.tensor_parallel_size or 1})
