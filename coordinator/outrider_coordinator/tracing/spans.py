"""Spans of a request, made from its notes.

    request            SERVER; how it was asked for, what came of it
      tokenize         until it is ready to wait its turn
      compile grammar  of a request with one, within ``tokenize``
      queue            until it is admitted
      prefill          until the first token
      decode           from admission to the end; above all that services do for the request
        step           from the verdict before to this one's
          wire         one exchange's interval less the service's own time
          draft        the draft's own time for the exchange
          wire, score  the same of the target
          accept       judging, and what is asked next

The coordinator cannot tell the way there from the way back without comparing clocks of two hosts: a ``wire`` is the sum
of both and drawn before the service's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from outrider.ports import ItemTiming
from outrider.telemetry.tracing import TraceContext, names
from outrider.telemetry.tracing.context import new_span_id
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind
from outrider.types import FinishReason
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats
from outrider_coordinator.tracing.notes import Exchange, Notes, Step

Attributes = dict[str, AttributeValue]
Given = Mapping[str, AttributeValue]

CANCELLED = "cancelled"
UNFINISHED = "the request ended within this step"


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of spans that are needed before the request ends."""

    request: TraceContext
    decode: TraceContext
    caller_span_id: str
    """Empty: the trace begins here."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A finished request. What it refers to does not change any more."""

    engine_request: EngineRequest
    spec_stats: SpecDecodeStats
    num_output: int
    finish_reason: FinishReason | None
    error: str
    error_type: str

    @classmethod
    def of(cls, loop: SessionLoop, ending: Finish | Fail) -> RequestFacts:
        """The facts of a session that is over."""
        reason, error, kind = None, "", ""
        if isinstance(ending, Fail):
            error, kind = str(ending.error), type(ending.error).__name__
        else:
            reason = ending.reason
            if reason is FinishReason.CANCELLED:
                error, kind = "cancelled by the caller", CANCELLED
        return cls(loop.engine_request, loop.spec_stats, loop.tokens.num_output, reason, error, kind)


def refused_request(ids: Ids, notes: Notes, request_id: str, error: BaseException) -> Iterator[Span]:
    """The one span of a request that was not taken in."""
    is_cancelled = not isinstance(error, Exception)
    attributes: Attributes = {names.OPERATION_NAME: names.TEXT_COMPLETION, names.PROVIDER_NAME: "outrider"}
    attributes[names.ERROR_TYPE] = CANCELLED if is_cancelled else type(error).__name__
    if request_id:
        attributes[names.REQUEST_ID] = request_id
    yield _Writer(ids, notes).request(names.TEXT_COMPLETION, attributes, str(error) or CANCELLED)


def request_spans(ids: Ids, notes: Notes, facts: RequestFacts) -> Iterator[Span]:
    """All spans of a request that was taken in."""
    writer = _Writer(ids, notes)
    ended = notes.ended_ns or notes.arrived_ns
    ready, admitted = notes.tokenized_ns or ended, notes.admitted_ns
    yield writer.request(f"{names.TEXT_COMPLETION} {notes.model}", _request_attributes(facts, notes.model), facts.error)
    num_prompt_tokens = {names.USAGE_INPUT_TOKENS: len(facts.engine_request.prompt_token_ids)}
    yield writer.below_request(names.TOKENIZE, notes.arrived_ns, ready, num_prompt_tokens)
    if notes.grammar_ns is not None:
        yield writer.below_request(names.COMPILE_GRAMMAR, *notes.grammar_ns)
    yield writer.below_request(names.QUEUE, ready, ended if admitted is None else admitted)
    if admitted is None:
        return
    yield writer.below_request(names.PREFILL, admitted, notes.first_token_ns or ended, num_prompt_tokens)
    yield writer.decode(admitted, ended, _decode_attributes(facts, notes), facts.error)
    for step in notes.steps:
        yield from _step_spans(writer, step, ended)


class _Writer:
    """Makes the spans of one trace, from readings of the coordinator's clock."""

    def __init__(self, ids: Ids, notes: Notes) -> None:
        self._ids, self._notes = ids, notes
        self.decode_id = ids.decode.span_id

    def request(self, name: str, attributes: Given, error: str) -> Span:
        ids, notes = self._ids, self._notes
        ended = notes.ended_ns or notes.arrived_ns
        span = self.span(name, ids.caller_span_id, notes.arrived_ns, ended, attributes=attributes, error=error)
        return replace(span, span_id=ids.request.span_id, kind=SpanKind.SERVER)

    def below_request(self, name: str, start_ns: int, end_ns: int, attributes: Given | None = None) -> Span:
        return self.span(name, self._ids.request.span_id, start_ns, end_ns, attributes=attributes)

    def decode(self, start_ns: int, end_ns: int, attributes: Given, error: str) -> Span:
        span = self.below_request(names.DECODE, start_ns, end_ns, attributes)
        return replace(span, span_id=self._ids.decode.span_id, error=error)

    def span(
        self,
        name: str,
        parent_id: str,
        start_ns: int,
        end_ns: int,
        *,
        attributes: Given | None = None,
        error: str = "",
    ) -> Span:
        epoch_ns = self._notes.epoch_ns
        return Span(
            name=name,
            trace_id=self._ids.request.trace_id,
            span_id=new_span_id(),
            parent_id=parent_id,
            start_ns=start_ns + epoch_ns,
            end_ns=end_ns + epoch_ns,
            attributes=attributes or {},
            error=error,
            trace_state=self._ids.request.state,
        )


def _step_spans(writer: _Writer, step: Step, request_ended_ns: int) -> Iterator[Span]:
    ended = step.ended_ns or request_ended_ns
    error = "" if step.ended_ns else UNFINISHED
    attributes = _step_attributes(step)
    above = writer.span(names.STEP, writer.decode_id, step.began_ns, ended, attributes=attributes, error=error)
    yield above
    for exchange in step.exchanges:
        yield from _exchange_spans(writer, exchange, above.span_id, ended)
    if step.judging_ns is not None:
        yield writer.span(names.ACCEPT, above.span_id, step.judging_ns, ended)


def _exchange_spans(writer: _Writer, exchange: Exchange, step_id: str, step_ended_ns: int) -> Iterator[Span]:
    name = names.DRAFT if exchange.is_draft else names.SCORE
    timing, answered = exchange.timing, exchange.answered_ns
    attributes: Attributes = {
        names.DRAFT_LENGTH: exchange.draft_length,
        names.GENERATION: exchange.generation,
        names.IS_PREFILL: exchange.is_prefill,
        names.OUTCOME: exchange.outcome,
    }
    if answered is None:
        yield writer.span(name, step_id, exchange.sent_ns, step_ended_ns, attributes=attributes, error=exchange.outcome)
        return
    began, interval = exchange.sent_ns, answered - exchange.sent_ns
    attributes |= {names.INTERVAL_NS: interval, names.IS_LATE: answered > step_ended_ns}
    if timing is not None:
        wire = interval - timing.total_ns
        attributes |= {**timing_attributes(timing), names.WIRE_NS: wire}
        peer: Attributes = {names.PEER: "draft" if exchange.is_draft else "target"}
        yield writer.span(names.WIRE, step_id, began, began + wire, attributes=peer)
        began += wire
    yield writer.span(name, step_id, began, answered, attributes=attributes)


def timing_attributes(timing: ItemTiming) -> Attributes:
    """Time of a service for one item, by stage."""
    return {
        names.QUEUE_NS: timing.queue_ns,
        names.FORWARD_NS: timing.forward_ns,
        names.SAMPLE_NS: timing.sample_ns,
        names.WAIT_NS: timing.wait_ns,
        names.TOTAL_NS: timing.total_ns,
    }


def _step_attributes(step: Step) -> Attributes:
    attributes: Attributes = {
        names.STEP_NUMBER: step.number,
        names.BASE_LENGTH: step.base_length,
        names.DRAFT_LENGTH: step.num_drafted,
        names.NUM_ACCEPTED: step.num_accepted,
        names.WAITED_FOR_DRAFT: step.waited_for_draft,
    }
    if step.no_draft_reason:
        attributes[names.NO_DRAFT_REASON] = step.no_draft_reason
    return attributes


def _request_attributes(facts: RequestFacts, model: str) -> Attributes:
    engine_request, sampling = facts.engine_request, facts.engine_request.sampling
    attributes: Attributes = {
        names.OPERATION_NAME: names.TEXT_COMPLETION,
        names.PROVIDER_NAME: "outrider",
        names.REQUEST_MODEL: model,
        names.RESPONSE_MODEL: model,
        names.REQUEST_MAX_TOKENS: engine_request.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        # An attribute's integer is signed, a seed is not.
        names.REQUEST_SEED: engine_request.seed if engine_request.seed < 2**63 else str(engine_request.seed),
        names.REQUEST_STOP_SEQUENCES: engine_request.stop,
        names.USAGE_INPUT_TOKENS: len(engine_request.prompt_token_ids),
        names.USAGE_OUTPUT_TOKENS: facts.num_output,
        names.RESPONSE_ID: engine_request.request_id,
        names.REQUEST_ID: engine_request.request_id,
        names.ACCEPTANCE_METHOD: engine_request.acceptance_method.value,
    }
    if facts.finish_reason is not None:
        attributes[names.RESPONSE_FINISH_REASONS] = (facts.finish_reason.value,)
    if facts.error_type:
        attributes[names.ERROR_TYPE] = facts.error_type
    return attributes


def _decode_attributes(facts: RequestFacts, notes: Notes) -> Given:
    spec_stats = facts.spec_stats
    attributes: Attributes = {
        names.NUM_STEPS: spec_stats.num_steps,
        names.NUM_STEPS_NOT_SHOWN: notes.num_steps_left_out,
        names.NUM_DRAFT_TOKENS: spec_stats.num_draft_tokens,
        names.NUM_ACCEPTED_TOKENS: spec_stats.num_accepted_tokens,
        names.USAGE_OUTPUT_TOKENS: facts.num_output,
        names.NUM_DRAFT_TIMEOUTS: spec_stats.num_draft_timeouts,
        names.NUM_STALE_REPLIES: spec_stats.num_stale_replies,
        names.NUM_DRAFT_LOSSES: spec_stats.num_draft_losses,
        names.NUM_TARGET_LOSSES: spec_stats.num_target_losses,
        names.NUM_BAD_EVIDENCE: spec_stats.num_bad_evidence,
    }
    if spec_stats.num_draft_tokens:
        attributes[names.ACCEPTANCE_RATE] = spec_stats.num_accepted_tokens / spec_stats.num_draft_tokens
        attributes[names.MEAN_ACCEPTANCE_LENGTH] = spec_stats.mean_acceptance_length
    return attributes
