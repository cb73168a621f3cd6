"""A request of our own, and the spans that three processes make of it.

Owns the waiting: exporters hold spans back for some seconds, and each process sends its own.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.addresses import split_address
from outrider.cli.demo import plan_demo
from outrider.cli.options import progress
from outrider.cli.stack.running import run_with_client
from outrider.cli.trace.reading import Followed, read_spans
from outrider.cli.trace.tree import what_is_missing
from outrider.client import AsyncClient, Client
from outrider.client.requests import GenerateOptions
from outrider.errors import ConfigError, UnavailableError, install_command
from outrider.telemetry.tracing import TraceContext
from outrider.telemetry.tracing.context import new_span_id, new_trace_id
from outrider.telemetry.tracing.span import Span

Collected = tuple[str, Sequence[Span]]
"""The request's trace, and spans among which its own are."""

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_POLL_S = 0.1
"""Interval at which the trace file is looked at."""
_WARM_UP_TOKENS = 16
"""Tokens of the request before the traced one, so that no first use is traced."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that is made to be looked at."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def options(self, context: TraceContext) -> GenerateOptions:
        """Options for the SDK."""
        return GenerateOptions(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            trace_parent=context.trace_parent,
        )


def trace_demo(asked: TracedRequest, *, verbose: int) -> Collected:
    """Start the embedded pair, make the request to it when it is warm, stop it: then all spans are written."""
    context = _new_context(is_sampled=True)

    async def ask(client: AsyncClient) -> None:
        warm_up = TracedRequest(asked.prompt, _WARM_UP_TOKENS, asked.temperature, asked.seed)
        await client.generate(**warm_up.options(_new_context(is_sampled=False)))
        await client.generate(**asked.options(context))

    with tempfile.TemporaryDirectory() as folder:
        services = ("target", "draft", "coordinator")
        files = {service: Path(folder) / f"{service}.jsonl" for service in services}
        plan = plan_demo({(service, "trace_file"): str(file) for service, file in files.items()})
        asyncio.run(run_with_client(plan, ask, verbose=verbose))
        return context.trace_id, read_spans(list(files.values()))


async def trace_files(
    open_client: Callable[[], Client], asked: TracedRequest, files: Sequence[Path], *, wait_s: float
) -> Collected:
    """Make the request; its spans are those that services then add to these files."""
    followed = Followed(files)
    return await _ask_and_collect(open_client, asked, followed.added, wait_s, "these files as trace_file")


async def trace_received(
    open_client: Callable[[], Client], asked: TracedRequest, *, listen: str, wait_s: float
) -> Collected:
    """Make the request; its spans are those that services then send here."""
    try:
        from outrider.transport.otlp import serve_otlp
    except ModuleNotFoundError as error:
        raise ConfigError("listen", f"needs OpenTelemetry: {install_command('telemetry')}") from error
    received: list[Span] = []
    host, port = _host_and_port(listen)
    server = await serve_otlp(received.extend, host=host, port=port)
    try:
        return await _ask_and_collect(
            open_client, asked, lambda: _take(received), wait_s, f"{_ENDPOINT}=http://{listen}"
        )
    finally:
        await server.stop()


async def _ask_and_collect(
    open_client: Callable[[], Client],
    asked: TracedRequest,
    take: Callable[[], Sequence[Span]],
    wait_s: float,
    where: str,
) -> Collected:
    """``where``: the setting by which services send their spans to where they are taken from."""
    context = _new_context(is_sampled=True)

    remedy = f"restart `outrider serve` with {where}, and leave OTEL_TRACES_SAMPLER unset or parentbased_always_off"

    def ask() -> None:
        with open_client() as client:
            if not client.model_info().exports_traces:
                raise UnavailableError(f"the coordinator exports no spans: {remedy}")
            client.generate(**asked.options(context))

    await asyncio.to_thread(ask)
    spans: list[Span] = []
    deadline = time.monotonic() + wait_s
    with progress.status("waiting for the services' spans"):
        while True:
            spans += take()
            missing = what_is_missing(spans, context.trace_id)
            if not missing or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
    if "coordinator" in missing:
        raise UnavailableError(
            f"the coordinator's spans of trace {context.trace_id} did not come within {wait_s:g} s: {remedy}"
        )
    return context.trace_id, spans


def _new_context(*, is_sampled: bool) -> TraceContext:
    """A caller's span, which is not exported."""
    return TraceContext(new_trace_id(), new_span_id(), is_sampled)


def _take(received: list[Span]) -> list[Span]:
    taken = received.copy()
    received.clear()
    return taken


def _host_and_port(listen: str) -> tuple[str, int]:
    host, port = split_address(listen)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("listen", f"should be HOST:PORT, not {listen!r}")
    return host, int(port)
