"""A trace on a terminal: the request's phases on one scale, then its steps, each with its stages, on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.trace.stages import milliseconds, stage_figures
from outrider.cli.trace.tree import Node, num_steps_not_traced
from outrider.telemetry.tracing import names

COLOURS = {
    names.TOKENIZE: "bright_black",
    names.COMPILE_GRAMMAR: "bright_black",
    names.QUEUE: "bright_black",
    names.PREFILL: "magenta",
    names.DECODE: "white",
    names.DRAFT: "blue",
    names.SCORE: "yellow",
    names.MASK: "cyan",
    names.WIRE: "red",
    names.ACCEPT: "green",
}
_GLYPHS = {"blue": "▒", "yellow": "█", "cyan": "+", "red": "·", "green": "|"}
"""Glyphs without colours: the steps' stages; everything else is one block after another."""
_LEGEND = (names.DRAFT, names.SCORE, names.MASK, names.WIRE, names.ACCEPT)
_NARROWEST, _WIDEST = 20, 100
_BESIDE_BARS = 58
"""Characters of a line for names and times."""

Glyphs = Mapping[str, str]
"""Glyphs by colour."""


def show_waterfall(console: Console, root: Node, *, max_steps: int) -> None:
    """Draw it. Steps past ``max_steps`` are counted."""
    width = max(_NARROWEST, min(_WIDEST, console.width - _BESIDE_BARS))
    glyphs = _GLYPHS if console.color_system is None else {}
    console.print(_heading(root))
    console.print(_phases(root, width, glyphs))
    steps = [step for decode in root.named(names.DECODE) for step in decode.named(names.STEP)]
    if steps:
        console.print(_legend(len(steps), max_steps, glyphs))
        console.print(_steps(steps[:max_steps], width, glyphs))
    console.print(_figures(root))
    left_out = num_steps_not_traced(root)
    if left_out:
        console.print(
            f"{left_out} more steps were only counted: the figures of stages are without them", style="yellow"
        )


def _heading(root: Node) -> Text:
    attributes, span = root.span.attributes, root.span
    said = [
        f"trace {span.trace_id}",
        f"request {attributes.get(names.REQUEST_ID, '?')}",
        f"{attributes.get(names.USAGE_OUTPUT_TOKENS, 0)} tokens in {milliseconds(span.duration_ns)}",
    ]
    heading = Text("  ".join(said), style="bold")
    if span.error:
        heading.append(f"\n{attributes.get(names.ERROR_TYPE, 'error')}: {span.error}", style="red")
    return heading


def _phases(root: Node, width: int, glyphs: Glyphs) -> Table:
    table = _rows("phase", "took", "")
    for node in (root, *root.children):
        name = "request" if node is root else node.span.name
        colour = "cyan" if node is root else COLOURS.get(name, "white")
        bar = _bar([(node.start_ns, node.end_ns, colour)], root.span.duration_ns, width, glyphs)
        table.add_row(name, milliseconds(node.span.duration_ns), bar)
    return table


def _legend(num_steps: int, max_steps: int, glyphs: Glyphs) -> Text:
    text = Text("\nsteps, from the verdict before to their own: ")
    for name in _LEGEND:
        text.append(glyphs.get(COLOURS[name], "█"), style=COLOURS[name]).append(f" {name}  ")
    if num_steps > max_steps:
        text.append(f"({num_steps - max_steps} more are not shown)", style="dim")
    return text


def _steps(steps: Sequence[Node], width: int, glyphs: Glyphs) -> Table:
    longest = max(step.span.duration_ns for step in steps)
    table = _rows("step", "took", "kept", names.AHEAD, "")
    for step in steps:
        attributes = step.span.attributes
        drafted = attributes.get(names.DRAFT_LENGTH, 0)
        why = str(attributes.get(names.NO_DRAFT_REASON, "")) or "-"
        kept = f"{attributes.get(names.NUM_ACCEPTED, 0)} of {drafted}" if drafted else why
        parts = [
            (each.start_ns - step.start_ns, each.end_ns - step.start_ns, COLOURS.get(each.span.name, "white"))
            for stage in step.children
            if stage.span.name != names.AHEAD
            for each in (stage, *_masks(stage))
        ]
        ahead = "+".join(dict.fromkeys(str(each.span.attributes.get(names.ROLE)) for each in step.named(names.AHEAD)))
        number = str(attributes.get(names.STEP_NUMBER, "?"))
        bar = _bar(parts, longest, width, glyphs)
        table.add_row(number, milliseconds(step.span.duration_ns), kept, ahead, bar)
    return table


def _masks(stage: Node) -> list[Node]:
    """Masks of grammars that the service made beside its forwards."""
    return [mask for item in stage.children for mask in item.named(names.MASK)]


def _figures(root: Node) -> Table:
    table = _rows("\nstage", "\nwhose", "\ncount", "\nin all", "\neach", "\nof the request")
    for found in stage_figures(root):
        table.add_row(
            found.name,
            found.whose,
            str(found.count),
            milliseconds(found.total_ns),
            milliseconds(found.mean_ns),
            f"{found.share:.1%}",
        )
    return table


def _rows(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for index, head in enumerate(heads):
        is_text = index == 0 or not head or head.strip() == "whose"
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    return table


def _bar(parts: Sequence[tuple[int, int, str]], whole_ns: int, width: int, glyphs: Glyphs) -> Text:
    """Coloured blocks; what is there at all takes a cell, and what comes later is drawn over what came before."""
    cells = [""] * width
    for start, end, colour in parts:
        first = min(width - 1, int(width * start / max(whole_ns, 1)))
        last = min(width, max(first + 1, round(width * end / max(whole_ns, 1))))
        cells[max(0, first) : last] = [colour] * (last - max(0, first))
    bar = Text()
    for colour in cells:
        bar.append(glyphs.get(colour, "█") if colour else " ", style=colour or None)
    return bar
