"""``outrider trace``: the command itself; where spans come from, and where drawings go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output, progress
from outrider.cli.server_flags import ServerFlags
from outrider.cli.trace.asking import Collected, TracedRequest, trace_demo, trace_files, trace_received
from outrider.cli.trace.chrome import chrome_trace
from outrider.cli.trace.page import render_page
from outrider.cli.trace.reading import read_spans
from outrider.cli.trace.stages import milliseconds
from outrider.cli.trace.tree import Node, build_tree, choose_trace, requests_of, what_is_missing
from outrider.cli.trace.waterfall import show_waterfall
from outrider.demo import PROMPTS
from outrider.errors import ConfigError
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.span import Span

DEFAULT_LISTEN = "127.0.0.1:4317"
"""The default address of OpenTelemetry's exporters."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Files with saved spans: trace_file of each service, or the file of a collector.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class TracedRequestFlags:
    """The request that is traced."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of the request.")] = 64
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Temperature of the request.")] = 0.8
    seed: Annotated[int, typer.Option(help="Seed of the request.")] = 1

    def asked(self, prompt: str | None) -> TracedRequest:
        """The request with a prompt, by default one of the demonstration."""
        return TracedRequest(prompt or PROMPTS[1], self.max_tokens, self.temperature, self.seed)


@dataclass(frozen=True, slots=True)
class DrawingFlags:
    """Files into which the trace is drawn, besides the terminal."""

    html: Annotated[Path | None, typer.Option(help="Write the waterfall to one HTML file.")] = None
    chrome: Annotated[Path | None, typer.Option(help="Write a Chrome trace (JSON), which Perfetto opens.")] = None
    max_steps: Annotated[int, typer.Option(min=0, help="Maximum number of steps shown on the terminal.")] = 40

    @property
    def files(self) -> Iterator[tuple[str, Path, Callable[[Node], str]]]:
        """Flag, file and drawing of each file that is to be written."""
        for flag, path, draw in (("html", self.html, render_page), ("chrome", self.chrome, chrome_trace)):
            if path is not None:
                yield flag, path, draw


@with_flag_groups
def trace(
    files: Files = None,
    *,
    demo: Annotated[bool, typer.Option("--demo", help="Start the embedded pair and trace a request.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Send a request with this prompt and trace it.")] = None,
    server: ServerFlags,
    listen: Annotated[
        str,
        typer.Option(
            help="With --prompt and without files: the address to which the services send their spans (OTLP over gRPC)."
        ),
    ] = DEFAULT_LISTEN,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the spans of --prompt.")] = 20.0,
    request: TracedRequestFlags,
    trace_id: Annotated[
        str | None, typer.Option(help="Id of a trace in the files, or its beginning. Default: the last request.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the requests in the files.")] = False,
    drawing: DrawingFlags,
    verbose: Verbose = 0,
) -> None:
    """Show one request as a waterfall: the time of every step over all three services.

    The spans come from files, from a request to running services (--prompt), or from the embedded pair (--demo).
    """
    paths = files or []
    _check_ways(paths, demo=demo, prompt=prompt, is_reading_flag_set=list_all or trace_id is not None)
    if list_all:
        output.print(_list(read_spans(paths)))
        return
    _check_writable(drawing)
    asked = request.asked(prompt)
    if demo:
        found = trace_demo(asked, verbose=verbose)
    elif prompt is None:
        found = _read(paths, trace_id)
    elif paths:
        found = asyncio.run(trace_files(server.connect, asked, paths, wait_s=wait))
    else:
        found = asyncio.run(trace_received(server.connect, asked, listen=listen, wait_s=wait))
    _draw(*found, drawing)


def _check_ways(files: Sequence[Path], *, demo: bool, prompt: str | None, is_reading_flag_set: bool) -> None:
    if not (files or demo or prompt is not None):
        raise ConfigError("", "nothing to trace: name files of spans, or give --prompt or --demo")
    if demo and files:
        raise ConfigError("demo", "traces a request of its own and reads no files")
    if is_reading_flag_set and (demo or prompt is not None):
        raise ConfigError("", "--list and --trace-id are of spans in files, not of a request that is made now")


def _read(files: Sequence[Path], trace_id: str | None) -> Collected:
    spans = read_spans(files)
    return choose_trace(spans, trace_id), spans


def _check_writable(drawing: DrawingFlags) -> None:
    """Check the output file before the request, which may take long."""
    for flag, path, _ in drawing.files:
        if not path.absolute().parent.is_dir():
            raise ConfigError(flag, f"{path} cannot be written: {path.absolute().parent} is no folder")


def _draw(trace_id: str, spans: Sequence[Span], drawing: DrawingFlags) -> None:
    root = build_tree(spans, trace_id)
    show_waterfall(output, root, max_steps=drawing.max_steps)
    missing = what_is_missing(spans, trace_id)
    if missing:
        owners = " and ".join(f"the {service}'s" for service in missing)
        progress.print(f"some of {owners} spans are not there: are they sent to the same place?", style="yellow")
    for flag, path, draw in drawing.files:
        try:
            path.write_text(draw(root), encoding="utf-8")
        except OSError as error:
            raise ConfigError(flag, f"{path} cannot be written: {error.strerror or error}") from error
        progress.print(f"wrote {path}", markup=False)


def _list(spans: Sequence[Span]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("trace", "request", "model", "tokens", "took", "error"):
        table.add_column(head, justify="right" if head in {"tokens", "took"} else "left", no_wrap=True)
    for span in requests_of(spans):
        attributes = span.attributes
        table.add_row(
            span.trace_id,
            str(attributes.get(names.REQUEST_ID, "")),
            str(attributes.get(names.REQUEST_MODEL, "")),
            str(attributes.get(names.USAGE_OUTPUT_TOKENS, "")),
            milliseconds(span.duration_ns),
            str(attributes.get(names.ERROR_TYPE, "")),
        )
    return table
