"""Spans of a traced item, made from a service's notes.

    draft propose, target score    the item, below the request's decode span, from its arrival to its answer
      queue                        until its first forward
      forward, sample              of each forward that served it and no other traced item
      mask                         of the masks of grammars that were made beside it
      wait                         from there to the next forward, or to the answer
    forward, mask, sample          of one that served several: a trace of its own, with links to all those items
    ahead                          below the decode span: what ran of a forward before it was asked for

The item's own attributes hold its stage times, also for forwards that it shared with other items.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from outrider.recording import AheadRecord, AnyRecord, ForwardRecord, ItemRecord
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.activation import Tracing
from outrider.telemetry.tracing.context import TraceContext, new_span_id, new_trace_id
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind, SpanLink

MAX_LINKS = 128
"""Maximum number of links of a span, which is OpenTelemetry's limit."""

_ITEM_NAMES = {"draft": names.PROPOSE_ITEM, "target": names.SCORE_ITEM}


class ServiceRecorder:
    """Implements ``outrider.recording.Recorder``: converts the records of finished items to spans."""

    def __init__(self, tracing: Tracing, role: str) -> None:
        self._tracing = tracing
        self._role, self._item_name = role, _ITEM_NAMES[role]

    def ended(self, records: Sequence[AnyRecord]) -> None:
        """Hand over finished records."""
        for record in records:
            if isinstance(record, ItemRecord):
                self._tracing.emit(partial(item_spans, record, self._item_name))
            else:
                self._tracing.emit(partial(ahead_spans, record, self._role))


def ahead_spans(record: AheadRecord, role: str) -> Iterator[Span]:
    """The span of work ahead."""
    parent = TraceContext.parse(record.trace_parent)
    if parent is None:
        return
    epoch_ns = time.time_ns() - time.perf_counter_ns()
    attributes: dict[str, AttributeValue] = {
        names.ROLE: role,
        names.SESSION: record.session,
        names.BASE_LENGTH: record.base_length,
        names.BATCH_SIZE: record.batch_size,
    }
    yield _child(names.AHEAD, parent, record.started_ns + epoch_ns, record.ended_ns + epoch_ns, attributes)


def item_spans(item: ItemRecord, name: str) -> Iterator[Span]:
    """The spans of one item, and of the shared forwards of which it is the first item. Not thread-safe."""
    parent = TraceContext.parse(item.trace_parent)
    if parent is None:
        return
    epoch_ns = time.time_ns() - time.perf_counter_ns()
    above = TraceContext(parent.trace_id, _id_of(item), is_sampled=True)
    shared = [found for found in item.forwards if len(found.items) > 1]
    yield Span(
        name=name,
        trace_id=above.trace_id,
        span_id=above.span_id,
        parent_id=parent.span_id,
        start_ns=item.arrived_ns + epoch_ns,
        end_ns=item.ended_ns + epoch_ns,
        kind=SpanKind.SERVER,
        attributes=_item_attributes(item),
        links=tuple(SpanLink(*_ids_of(found)) for found in shared[:MAX_LINKS]),
        error=item.error,
    )
    first = item.forwards[0].started_ns if item.forwards else item.ended_ns
    yield _child(names.QUEUE, above, item.arrived_ns + epoch_ns, first + epoch_ns)
    for found in item.forwards:
        if len(found.items) == 1:
            yield from _forward_spans(found, above, epoch_ns)
        elif found.items[0] is item:
            yield from _shared_forward_spans(found, epoch_ns)
    yield from _wait_spans(item, above, epoch_ns)
    item.forwards = []  # nothing is left that refers to itself


def _wait_spans(item: ItemRecord, above: TraceContext, epoch_ns: int) -> Iterator[Span]:
    nexts = [found.started_ns for found in item.forwards[1:]] + [item.ended_ns]
    for found, until in zip(item.forwards, nexts, strict=False):
        yield _child(names.WAIT, above, found.ended_ns + epoch_ns, until + epoch_ns)


def _id_of(item: ItemRecord) -> str:
    item.span_id = item.span_id or new_span_id()
    return item.span_id


def _ids_of(found: ForwardRecord) -> tuple[str, str]:
    if not found.span_id:
        found.trace_id, found.span_id = new_trace_id(), new_span_id()
    return found.trace_id, found.span_id


def _shared_forward_spans(found: ForwardRecord, epoch_ns: int) -> Iterator[Span]:
    trace_id, span_id = _ids_of(found)
    parents = [(TraceContext.parse(item.trace_parent), item) for item in found.items[:MAX_LINKS]]
    links = tuple(SpanLink(parent.trace_id, _id_of(item)) for parent, item in parents if parent is not None)
    forward, *beside = _forward_spans(found, TraceContext(trace_id, "", is_sampled=True), epoch_ns)
    yield replace(forward, span_id=span_id, links=links)
    for span in beside:
        yield replace(span, parent_id=span_id)


def _forward_spans(found: ForwardRecord, above: TraceContext, epoch_ns: int) -> Iterator[Span]:
    computed = found.computed_ns + epoch_ns
    attributes: dict[str, AttributeValue] = {
        names.BATCH_SIZE: found.batch_size,
        names.NUM_TOKENS: found.num_tokens,
        names.USED_GRAPH: found.used_graph,
    }
    yield _child(names.FORWARD, above, found.started_ns + epoch_ns, computed, attributes)
    if found.masked_ns is not None:
        began, ended = found.masked_ns
        yield _child(names.MASK, above, began + epoch_ns, ended + epoch_ns)
    yield _child(names.SAMPLE, above, computed, found.ended_ns + epoch_ns)


def _child(
    name: str, above: TraceContext, start_ns: int, end_ns: int, attributes: dict[str, AttributeValue] | None = None
) -> Span:
    return Span(name, above.trace_id, new_span_id(), above.span_id, start_ns, end_ns, attributes=attributes or {})


def _item_attributes(item: ItemRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.SESSION: item.session,
        names.GENERATION: item.generation,
        names.OUTCOME: item.outcome,
    }
    timing = item.timing
    if timing is not None:
        attributes |= {
            names.QUEUE_NS: timing.queue_ns,
            names.FORWARD_NS: timing.forward_ns,
            names.SAMPLE_NS: timing.sample_ns,
            names.WAIT_NS: timing.wait_ns,
            names.TOTAL_NS: timing.total_ns,
        }
    if item.forwards:
        attributes[names.BATCH_SIZE] = item.forwards[-1].batch_size
        attributes[names.USED_GRAPH] = all(found.used_graph for found in item.forwards)
    return attributes
