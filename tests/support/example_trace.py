"""The spans of one request as three processes export them: two steps, and a target whose clock is an hour ahead."""

from __future__ import annotations

from dataclasses import replace

from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind, SpanLink

TRACE, SHARED_TRACE = "0a" * 16, "0b" * 16
REQUEST, DECODE, SHARED_FORWARD = "a1" * 8, "a2" * 8, "b1" * 8
BEGAN_NS = 1_700_000_000_000_000_000
HOUR_NS = 3_600_000_000_000
MS = 1_000_000
DRAFT, TARGET, COORDINATOR = "outrider-draft", "outrider-target", "outrider-coordinator"


def example_spans(*, trace_id: str = TRACE, request_id: str = "of-a-test", later_ns: int = 0) -> list[Span]:
    """100 ms: tokenizing 1, queue 1, a prefill step of 48 and one of 50 ms with a draft of which 2 of 4 are kept."""
    made: list[Span] = []

    def add(
        name: str, parent: str, start_ms: float, took_ms: float, *, span_id: str = "", service: str = COORDINATOR,
        kind: SpanKind = SpanKind.INTERNAL, links: tuple[SpanLink, ...] = (), trace: str = trace_id,
        **attributes: AttributeValue,
    ) -> str:  # fmt: skip
        span_id = span_id or f"{len(made) + 1:016x}"
        start_ns = BEGAN_NS + later_ns + int(start_ms * MS) + (HOUR_NS if service == TARGET else 0)
        named = {getattr(names, key): value for key, value in attributes.items()}
        span = Span(name, trace, span_id, parent, start_ns, start_ns + int(took_ms * MS), kind, named, links)
        made.append(replace(span, service=service))
        return span_id

    add(names.TEXT_COMPLETION, "", 0, 100, span_id=REQUEST, kind=SpanKind.SERVER, OPERATION_NAME=names.TEXT_COMPLETION,
        REQUEST_ID=request_id, REQUEST_MODEL="m", USAGE_INPUT_TOKENS=7, USAGE_OUTPUT_TOKENS=4)  # fmt: skip
    add(names.TOKENIZE, REQUEST, 0, 1)
    add(names.QUEUE, REQUEST, 1, 1)
    add(names.PREFILL, REQUEST, 2, 48)
    add(names.DECODE, REQUEST, 2, 98, span_id=DECODE, NUM_STEPS=2, NUM_STEPS_NOT_SHOWN=0, NUM_DRAFT_TOKENS=4,
        NUM_ACCEPTED_TOKENS=2, ACCEPTANCE_RATE=0.5, MEAN_ACCEPTANCE_LENGTH=3.0)  # fmt: skip
    one = add(names.STEP, DECODE, 2, 48, STEP_NUMBER=1, DRAFT_LENGTH=0, NO_DRAFT_REASON="prefill")
    add(names.WIRE, one, 2, 1, PEER="target")
    add(names.SCORE, one, 3, 46, GENERATION=1, TOTAL_NS=46 * MS)
    add(names.ACCEPT, one, 49, 1)
    two = add(names.STEP, DECODE, 50, 50, STEP_NUMBER=2, DRAFT_LENGTH=4, NUM_ACCEPTED=2)
    add(names.DRAFT, two, 51, 9, GENERATION=2, TOTAL_NS=9 * MS)
    add(names.WIRE, two, 60, 4, PEER="target")
    add(names.SCORE, two, 64, 35, GENERATION=3, TOTAL_NS=35 * MS)
    add(names.ACCEPT, two, 99, 1)
    prefill = add(names.SCORE_ITEM, DECODE, 2.5, 46, service=TARGET, kind=SpanKind.SERVER, GENERATION=1)
    add(names.FORWARD, prefill, 3.5, 45, service=TARGET, BATCH_SIZE=1, NUM_TOKENS=7, USED_GRAPH=False)
    score = add(names.SCORE_ITEM, DECODE, 63, 35, service=TARGET, kind=SpanKind.SERVER, GENERATION=3)
    add(names.QUEUE, score, 63, 5, service=TARGET)
    propose = add(names.PROPOSE_ITEM, DECODE, 50.5, 9, service=DRAFT, kind=SpanKind.SERVER, GENERATION=2)
    add(names.FORWARD, propose, 51, 8, service=DRAFT, BATCH_SIZE=1, NUM_TOKENS=4, USED_GRAPH=True)
    add(names.FORWARD, "", 68, 28, span_id=SHARED_FORWARD, service=TARGET, trace=SHARED_TRACE, BATCH_SIZE=2,
        links=(SpanLink("0c" * 16, "cc" * 8), SpanLink(trace_id, score)), NUM_TOKENS=10, USED_GRAPH=False)  # fmt: skip
    add(names.SAMPLE, SHARED_FORWARD, 96, 2, service=TARGET, trace=SHARED_TRACE)
    return made
