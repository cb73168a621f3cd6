"""Stages of a request's time: the figures of both drawings of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.cli.trace.tree import Node
from outrider.telemetry.tracing import names

SHOWN = (
    (names.TOKENIZE, "coordinator"),
    (names.COMPILE_GRAMMAR, "coordinator"),
    (names.QUEUE, "coordinator"),
    (names.DRAFT, "draft"),
    (names.SCORE, "target"),
    (names.WIRE, "both ways"),
    (names.ACCEPT, "coordinator"),
)
"""(stage, whose time it is), in the order of a request's life."""

_PARTS = ("", names.QUEUE, names.FORWARD, names.MASK, names.SAMPLE, names.WAIT)
"""Parts of a stage, itself first; only stages of services have more."""


ROLES = ("draft", "target")


@dataclass(frozen=True, slots=True)
class StageFigures:
    """All spans of one stage."""

    name: str
    whose: str
    count: int
    total_ns: int
    share: float
    """Share of the request's time. Shares of stages that overlap add up to more than 1."""

    @property
    def mean_ns(self) -> float:
        """Mean time of one occurrence."""
        return self.total_ns / self.count


def summary(root: Node) -> list[tuple[str, str]]:
    """(name, value with its unit): the request in a line of figures."""
    said, took = root.span.attributes, root.span.duration_ns
    prefills, decodes = root.named(names.PREFILL), root.named(names.DECODE)
    num_output = _number(said, names.USAGE_OUTPUT_TOKENS)
    found = [("whole request", duration(took))]
    if prefills:
        found.append(("to the first token", duration(prefills[0].end_ns)))
        if num_output > 1:
            found.append(("per token after it", duration((took - prefills[0].end_ns) / (num_output - 1))))
    found += [("tokens in", f"{_number(said, names.USAGE_INPUT_TOKENS):.0f}"), ("tokens out", f"{num_output:.0f}")]
    for attributes in [decode.span.attributes for decode in decodes]:
        found.append(("steps", f"{_number(attributes, names.NUM_STEPS):.0f}"))
        if names.ACCEPTANCE_RATE in attributes:
            found.append(("of the draft kept", f"{_number(attributes, names.ACCEPTANCE_RATE):.0%}"))
            found.append(("tokens a step", f"{_number(attributes, names.MEAN_ACCEPTANCE_LENGTH):.2f}"))
    return found


def duration(nanoseconds: float) -> str:
    """Duration as text, in the unit that suits it."""
    return milliseconds(nanoseconds) if nanoseconds < 1e9 else f"{nanoseconds / 1e9:.2f} s"


def milliseconds(nanoseconds: float) -> str:
    """Milliseconds as text."""
    return f"{nanoseconds / 1e6:.2f} ms"


def _number(attributes: Mapping[str, object], name: str) -> float:
    found = attributes.get(name)
    return found if isinstance(found, int | float) else 0


def stage_figures(root: Node) -> list[StageFigures]:
    """The stages of the request and its steps, each with what a service did within it."""
    durations: dict[tuple[str, str], list[int]] = defaultdict(list)
    steps = [step for decode in root.named(names.DECODE) for step in decode.named(names.STEP)]
    stages = [stage for step in steps for stage in step.children if stage.span.name != names.AHEAD]
    for node in (*root.children, *stages):
        durations[node.span.name, ""].append(node.span.duration_ns)
        for item in node.children:
            for part in item.children:
                durations[node.span.name, part.span.name].append(part.span.duration_ns)
    for outcome, above in (("used", steps), ("unused", root.named(names.DECODE))):
        for node in [ahead for each in above for ahead in each.named(names.AHEAD)]:
            durations[str(node.span.attributes.get(names.ROLE)), outcome].append(node.span.duration_ns)
    wanted = [((name, part), f"{name}: {part}" if part else name, whose) for name, whose in SHOWN for part in _PARTS]
    wanted += [((role, said), f"{names.AHEAD}: {said}", role) for role in ROLES for said in ("used", "unused")]
    whole = max(root.span.duration_ns, 1)
    return [
        StageFigures(name, whose, len(found), sum(found), sum(found) / whole)
        for key, name, whose in wanted
        if (found := durations.get(key))
    ]
