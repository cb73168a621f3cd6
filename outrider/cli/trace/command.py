"""``outrider trace``: the command itself; where spans come from, and where drawings go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.options import Verbose, output, progress
from outrider.cli.server_flags import ServerFlags, with_server_flags
from outrider.cli.trace.asking import Asked, Collected, trace_demo, trace_files, trace_received
from outrider.cli.trace.page import render_page
from outrider.cli.trace.reading import read_spans
from outrider.cli.trace.stages import milliseconds
from outrider.cli.trace.tree import build_tree, choose_trace, requests_of, what_is_missing
from outrider.cli.trace.waterfall import show_waterfall
from outrider.demo.prompts import PROMPTS
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


@with_server_flags
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of the request.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Temperature of the request.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the request.")] = 1,
    trace_id: Annotated[
        str | None, typer.Option(help="Id of a trace in the files, or its beginning. Default: the last request.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the requests in the files.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the waterfall to one HTML file.")] = None,
    max_steps: Annotated[int, typer.Option(min=0, help="Maximum number of steps shown on the terminal.")] = 40,
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
    _check_writable(html)
    asked = Asked(prompt or PROMPTS[1], max_tokens, temperature, seed)
    if demo:
        found = trace_demo(asked, verbose=verbose)
    elif prompt is None:
        found = _read(paths, trace_id)
    elif paths:
        found = asyncio.run(trace_files(server.connect, asked, paths, wait_s=wait))
    else:
        found = asyncio.run(trace_received(server.connect, asked, listen=listen, wait_s=wait))
    _draw(*found, html, max_steps)


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


def _check_writable(html: Path | None) -> None:
    """Before the request: it may take long."""
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError("html", f"{html} cannot be written: {html.absolute().parent} is no folder")


def _draw(trace_id: str, spans: Sequence[Span], html: Path | None, max_steps: int) -> None:
    root = build_tree(spans, trace_id)
    show_waterfall(output, root, max_steps=max_steps)
    missing = what_is_missing(spans, trace_id)
    if missing:
        told = " and ".join(f"the {service}'s" for service in missing)
        progress.print(f"some of {told} spans are not there: are they sent to the same place?", style="yellow")
    if html is not None:
        try:
            html.write_text(render_page(root), encoding="utf-8")
        except OSError as error:
            raise ConfigError("html", f"{html} cannot be written: {error.strerror or error}") from error
        progress.print(f"wrote {html}", markup=False)


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
