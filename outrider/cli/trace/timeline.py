"""Timelines of requests, one below the other on one scale: what target, draft and coordinator did, and when.

The services' clock is that of the coordinator: times are those of the spans, as on one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from outrider.cli.trace.stages import ROLES, stage_figures
from outrider.cli.trace.tree import Node
from outrider.cli.trace.waterfall import COLOURS
from outrider.telemetry.tracing import names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NS_PER_MS = 1e6
_LANES = {"coordinator": 2, "target": 1, "draft": 0}
_COLOURS = {"coordinator": COLOURS[names.ACCEPT], "target": "gold", "draft": "cornflowerblue"}
_NOTHING_PROPOSED = "nothing_proposed"
_SETTINGS = {"svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.5}
_NUM_SKIPPED = 3
"""Steps before the drawn ones: the prompt's, and the first that has drafts."""


class BusyPeriod(NamedTuple):
    """Work of a service without a pause; the times are those of the trace."""

    role: str
    start_ns: int
    end_ns: int
    outcome: str = ""
    """Outcome of work that was begun before it was asked for: "used" or "unused"."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request's steps."""

    name: str
    root: Node

    @property
    def steps(self) -> list[Node]:
        """Steps that are traced."""
        return [step for decode in self.root.named(names.DECODE) for step in decode.named(names.STEP)]

    @property
    def began_ns(self) -> int:
        """Start of the first step that is drawn."""
        return self.steps[min(_NUM_SKIPPED, len(self.steps) - 1)].span.start_ns

    @property
    def work(self) -> Iterator[BusyPeriod]:
        """All work of the steps."""
        for step in self.steps:
            for stage in step.children:
                yield from _work_of(stage)
        for decode in self.root.named(names.DECODE):
            for ahead in decode.named(names.AHEAD):
                yield BusyPeriod(str(ahead.span.attributes[names.ROLE]), *_times(ahead), "unused")

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures of the whole request, by name; times in milliseconds."""
        decode_ns = self.root.span.end_ns - self.steps[0].span.end_ns
        num_tokens = int(str(self.root.span.attributes.get(names.USAGE_OUTPUT_TOKENS, 0)))
        ahead = {(each.whose, each.name): each.total_ns / _NS_PER_MS for each in stage_figures(self.root)}
        return {
            "ms a token": decode_ns / _NS_PER_MS / max(num_tokens - 1, 1),
            "steps": len(self.steps),
            "hits": sum(any(_is_draft(each) for each in step.named(names.AHEAD)) for step in self.steps),
            "misses": sum(is_miss(step) for step in self.steps),
            **{
                f"{role} ahead, {outcome} ms": ahead.get((role, f"{names.AHEAD}: {outcome}"), 0.0)
                for role in ROLES
                for outcome in ("used", "unused")
            },
        }


def is_miss(step: Node) -> bool:
    """True if a step has no draft tokens because none were ready."""
    return step.span.attributes.get(names.NO_DRAFT_REASON) == _NOTHING_PROPOSED


def _is_draft(ahead: Node) -> bool:
    return ahead.span.attributes.get(names.ROLE) == "draft"


def _work_of(stage: Node) -> Iterator[BusyPeriod]:
    said = stage.span.attributes
    if stage.span.name == names.ACCEPT:
        yield BusyPeriod("coordinator", *_times(stage))
    elif stage.span.name == names.AHEAD:
        yield BusyPeriod(str(said[names.ROLE]), *_times(stage), "used")
    elif stage.span.name in (names.DRAFT, names.SCORE):
        role = "draft" if stage.span.name == names.DRAFT else "target"
        for item in stage.children:
            for part in (*item.named(names.FORWARD), *item.named(names.SAMPLE)):
                yield BusyPeriod(role, *_times(part))


def _times(node: Node) -> tuple[int, int]:
    return node.span.start_ns, node.span.end_ns


def draw_timelines(timelines: Sequence[Timeline], files: Sequence[Path], *, num_steps: int) -> None:
    """Write the drawing to each file, whose ending says its format: as much time of each request as ``num_steps`` usual
    steps of the slowest of them take. Needs matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    width_ns = num_steps * max(median(step.span.duration_ns for step in each.steps) for each in timelines)
    with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type] # its keys are literals
        figure = Figure(figsize=(11, 1.7 * len(timelines) + 0.6), layout="constrained")
        every = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, timeline in zip(every, timelines, strict=True):
            _draw(axes, timeline, width_ns)
        every[-1].set_xlabel(
            "ms; hatched: begun before it was asked for; grey: not used; x: a step without draft tokens"
        )
        for file in files:
            figure.savefig(file, dpi=150)


def _draw(axes: Axes, timeline: Timeline, width_ns: float) -> None:
    began = timeline.began_ns
    for work in timeline.work:
        if work.end_ns > began and work.start_ns < began + width_ns:
            axes.barh(
                _LANES[work.role],
                (work.end_ns - work.start_ns) / _NS_PER_MS,
                left=(work.start_ns - began) / _NS_PER_MS,
                color="lightgrey" if work.outcome == "unused" else _COLOURS[work.role],
                hatch="////" if work.outcome else None,
                edgecolor="dimgrey",
                linewidth=0.4,
                height=0.7,
            )
    num_tokens = 0
    for step in timeline.steps:
        start, end = ((moment - began) / _NS_PER_MS for moment in _times(step))
        if step.span.start_ns >= began and step.span.end_ns <= began + width_ns:
            kept = 1 + int(str(step.span.attributes.get(names.NUM_ACCEPTED, 0)))
            num_tokens += kept
            axes.axvline(end, color="black", alpha=0.2, linewidth=0.6)
            axes.annotate(f"+{kept}", (end, 2.5), ha="right", va="bottom", fontsize=7)
            if is_miss(step):
                axes.annotate("x", (start, 0), color="red", ha="left", va="center", fontsize=8)
    axes.set_xlim(0, width_ns / _NS_PER_MS)
    axes.set_ylim(-0.5, 3.0)
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    found = timeline.figures
    caption = f"{num_tokens} tokens here; of the whole request {found['ms a token']:.2f} ms a token"
    ahead = f", {found['hits']:.0f} proposals ahead, {found['misses']:.0f} steps without" if found["hits"] else ""
    axes.set_title(f"{timeline.name}: {caption}{ahead}", loc="left", fontsize=9)
