"""One trace as a tree that can be drawn: who called whom, when it began and how long it took.

Owns how clocks of different hosts are put side by side: what a service did for an item is shifted to where the
coordinator's own span of it lies, so that no clock is compared with another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.errors import InvalidRequestError
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.span import Span, SpanKind

_STAGE_OF_ITEM = {names.PROPOSE_ITEM: names.DRAFT, names.SCORE_ITEM: names.SCORE}


@dataclass(slots=True)
class Node:
    """One span and what lies below it."""

    span: Span
    start_ns: int
    """Start, counted from the request's arrival."""
    children: list[Node] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        """End, counted from the request's arrival."""
        return self.start_ns + self.span.duration_ns

    def walk(self) -> Iterator[Node]:
        """Itself and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def named(self, name: str) -> list[Node]:
        """Children with this name."""
        return [child for child in self.children if child.span.name == name]

    def shift(self, by_ns: int) -> None:
        """Draw it and all below it so much later."""
        for node in self.walk():
            node.start_ns += by_ns


def choose_trace(spans: Sequence[Span], trace_id: str | None) -> str:
    """The trace that is meant: the one named, or begun with, else of the request that came last."""
    requests = requests_of(spans)
    if trace_id is not None:
        found = {span.trace_id for span in requests if span.trace_id.startswith(trace_id.lower())}
        if len(found) != 1:
            reason = "is not among the requests" if not found else f"is the beginning of {len(found)}"
            raise InvalidRequestError("trace_id", f"{trace_id} {reason} in these spans")
        return found.pop()
    if not requests:
        raise InvalidRequestError("trace", "there is no request in these spans: the coordinator's are missing")
    return requests[-1].trace_id


def requests_of(spans: Sequence[Span]) -> list[Span]:
    """The requests' own spans, in the order of their coming."""
    return sorted((span for span in spans if _is_request(span)), key=lambda span: span.start_ns)


def what_is_missing(spans: Iterable[Span], trace_id: str) -> list[str]:
    """The services some of whose spans of a trace are not there, as far as the others tell."""
    mine = [span for span in spans if span.trace_id == trace_id]
    if not any(_is_request(span) for span in mine) or _num_steps_missing(mine):
        return ["coordinator"]
    there = {(_STAGE_OF_ITEM.get(span.name), span.attributes.get(names.GENERATION)) for span in mine}
    asked = [span for span in mine if span.name in _STAGE_OF_ITEM.values() and names.TOTAL_NS in span.attributes]
    missing = {span.name for span in asked if (span.name, span.attributes.get(names.GENERATION)) not in there}
    return [service for stage, service in ((names.DRAFT, "draft"), (names.SCORE, "target")) if stage in missing]


def _num_steps_missing(spans: Sequence[Span]) -> int:
    there = sum(span.name == names.ACCEPT for span in spans)
    decodes = [span.attributes for span in spans if span.name == names.DECODE]
    return sum(_number(said, names.NUM_STEPS) - _number(said, names.NUM_STEPS_NOT_SHOWN) for said in decodes) - there


def _number(attributes: Mapping[str, object], name: str) -> int:
    found = attributes.get(name)
    return found if isinstance(found, int) else 0


def num_steps_not_traced(root: Node) -> int:
    """The steps past ``coordinator.max_traced_steps``, which have no spans."""
    return sum(_number(decode.span.attributes, names.NUM_STEPS_NOT_SHOWN) for decode in root.named(names.DECODE))


def build_tree(spans: Iterable[Span], trace_id: str) -> Node:
    """The request of a trace; forwards that it shared with others are brought in from their own traces."""
    every = list(spans)
    mine = {span.span_id: span for span in every if span.trace_id == trace_id}
    request = next(span for span in mine.values() if _is_request(span))
    nodes = {span_id: Node(span, span.start_ns - request.start_ns) for span_id, span in mine.items()}
    _bring_in_shared(every, nodes, request)
    root = nodes[request.span_id]
    for node in nodes.values():
        if node is not root:
            nodes.get(node.span.parent_id, root).children.append(node)
    _move_items_to_their_stages(root)
    for node in root.walk():
        node.children.sort(key=lambda child: child.start_ns)
    return root


def _is_request(span: Span) -> bool:
    return span.kind is SpanKind.SERVER and span.attributes.get(names.OPERATION_NAME) == names.TEXT_COMPLETION


def _bring_in_shared(spans: Sequence[Span], nodes: dict[str, Node], request: Span) -> None:
    """Place shared spans below the item, as if it had been alone: the forward, and beside it its sampling."""
    below: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.parent_id:
            below[span.parent_id].append(span)
    for span in spans:
        item = next((link.span_id for link in span.links if link.span_id in nodes and span.name == names.FORWARD), None)
        if item is not None and span.span_id not in nodes:
            for found in (span, *below[span.span_id]):
                start_ns = found.start_ns - request.start_ns
                nodes[found.span_id] = Node(replace(found, parent_id=item), start_ns)


def _move_items_to_their_stages(root: Node) -> None:
    for decode in root.named(names.DECODE):
        shifts: dict[str, int] = {}
        stages = {
            (stage.span.name, stage.span.attributes.get(names.GENERATION)): stage
            for step in decode.named(names.STEP)
            for stage in step.children
            if stage.span.name in _STAGE_OF_ITEM.values()
        }
        for item in [child for child in decode.children if child.span.name in _STAGE_OF_ITEM]:
            key = (_STAGE_OF_ITEM[item.span.name], item.span.attributes.get(names.GENERATION))
            if key in stages:
                decode.children.remove(item)
                shifts[item.span.service] = stages[key].start_ns - item.start_ns
                item.shift(shifts[item.span.service])
                stages[key].children.append(item)
        _move_work_ahead(decode, shifts)


def _move_work_ahead(decode: Node, shifts: Mapping[str, int]) -> None:
    """Place work ahead below the step that used it; what none used stays where it is. ``shifts`` of the services."""
    bases = [(_number(step.span.attributes, names.BASE_LENGTH), step) for step in decode.named(names.STEP)]
    drafted = {base: step for base, step in bases if _number(step.span.attributes, names.DRAFT_LENGTH)}
    by_role = {"draft": drafted, "target": dict(bases)}
    for node in decode.named(names.AHEAD):
        node.shift(shifts.get(node.span.service, 0))
        said = node.span.attributes
        step = by_role.get(str(said.get(names.ROLE)), {}).get(_number(said, names.BASE_LENGTH))
        if step is not None:
            decode.children.remove(node)
            step.children.append(node)
