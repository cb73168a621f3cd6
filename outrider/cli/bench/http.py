"""``outrider bench http``: OpenAI-compatible servers, ours or another's, as their users see them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from outrider.cli.bench.harness import benchmark, table
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import output, progress
from outrider.errors import ConfigError, OutriderError, UnavailableError

_SERVERS = "NAME=URL"
_HEADS = (
    "server",
    "users",
    "first\ntoken ms",
    "ms a token\nof a stream",
    "after the\nfirst",
    "until all\nended",
    "prompts as\nthe first",
)


@dataclass(frozen=True, slots=True)
class HttpRequestFlags:
    """Requests to each server."""

    model: Annotated[
        str | None, typer.Option(help="Model of each request.", show_default="not sent: the server's own")
    ] = None
    request: Annotated[
        list[str] | None,
        typer.Option(
            "--request",
            metavar="NAME=JSON",
            help="Fields of a server's requests, of this table's name for it; may be repeated.",
        ),
    ] = None
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at the same time; may be repeated.", show_default="1"),
    ] = None
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128
    output_len: Annotated[int, typer.Option(min=2, help="New tokens.")] = 256
    vocab_size: Annotated[int, typer.Option(min=1, help="The random ids of prompts are below it.")] = 10_000
    last_token: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Id of a prompt's last token, from which synthetic text follows; several take turns."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0

    def loads(self, num_runs: int) -> Any:  # noqa: ANN401 - a benchmark's
        """The prompts of each number of users."""
        return benchmark("peers.run").make_loads(self.max_concurrency or [1], num_runs, 1, self._prompts)

    def _prompts(self, count: int) -> Sequence[tuple[int, ...]]:
        drawn = benchmark("serving.workload").random_prompts(count, self.input_len, self.vocab_size, self.seed)
        lasts = self.last_token
        if not lasts:
            return list(drawn)
        return [(*prompt[:-1], lasts[index % len(lasts)]) for index, prompt in enumerate(drawn)]

    def servers(self, named: Sequence[str]) -> tuple[Any, ...]:
        """The servers with the fields of their requests."""
        pairs = [_split(text, _SERVERS, "NAME=URL, such as ours=http://127.0.0.1:8000") for text in named]
        urls = dict(pairs)
        if len(urls) < len(pairs):
            raise ConfigError(_SERVERS, f"names should differ, and are {', '.join(name for name, _ in pairs)}")
        bodies = {name: {} if self.model is None else {"model": self.model} for name in urls}
        for text in self.request or ():
            name, fields = _split(text, "--request", "NAME=JSON")
            if name not in urls:
                raise ConfigError("--request", f"{name!r} is none of {', '.join(urls)}")
            bodies[name] |= _json_object(fields)
        for url in urls.values():
            if not _is_address(url):
                raise ConfigError(_SERVERS, f"{url!r} should be an address such as http://127.0.0.1:8000")
        made = benchmark("http.run").ServerUnderTest
        return tuple(made(name, url.rstrip("/").removesuffix("/v1"), bodies[name]) for name, url in urls.items())


@dataclass(frozen=True, slots=True)
class HttpRunFlags:
    """Repetitions, and the processes that send the requests."""

    runs: Annotated[int, typer.Option(min=1, help="Timed repetitions of each number of users.")] = 3
    num_warmups: Annotated[int, typer.Option(min=0, help="Untimed repetitions before them.")] = 1
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send the requests.")] = 1
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds of a repetition.")] = math.inf
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all samples.")] = None

    def check(self) -> None:
        """Raise a ``ConfigError`` before anything is measured."""
        if self.json_path is not None and not self.json_path.parent.is_dir():
            raise ConfigError("--json", f"{self.json_path.parent} is not a folder")
        if self.json_path is not None and self.json_path.is_dir():
            raise ConfigError("--json", f"{self.json_path} is a folder, and should be a file")


@with_flag_groups
def http(
    server: Annotated[list[str], typer.Argument(metavar="NAME=URL", help="A name for each server, and its address.")],
    *,
    requests: HttpRequestFlags,
    running: HttpRunFlags,
) -> None:
    """Measure OpenAI-compatible servers that run already: streamed completions, in turn, with one client."""
    bench = benchmark("http.run")
    running.check()
    loads = requests.loads(running.runs)
    plan = bench.HttpPlan(requests.servers(server), loads, requests.output_len, running.num_warmups)
    outcomes: list[Any] = []
    failed: list[str] = []

    def on_done(outcome: Any) -> None:  # noqa: ANN401 - a benchmark's
        outcomes.append(outcome)
        progress.print(_line(bench.to_row(outcome, outcomes)), markup=False)
        if running.json_path is not None:
            running.json_path.write_text(json.dumps(bench.to_json(outcomes, plan)) + "\n", encoding="utf-8")

    def on_failed(name: str, num_users: int, error: OutriderError) -> None:
        failed.append(f"{name} with {num_users} users: {error}")

    with bench.client_processes(running.client_processes, running.timeout) as send:
        bench.run_plan(plan, send, on_done=on_done, on_failed=on_failed)
    if outcomes:
        output.print(table(_HEADS, [bench.to_row(outcome, outcomes) for outcome in outcomes]))
    if failed:
        raise UnavailableError("; ".join(failed))


def _line(row: tuple[Any, ...]) -> str:
    name, users, first, token, after, until_all, same = row
    return (
        f"{name}, {users} users: {after:.3f} ms a token after the first ({token:.3f} of a stream, {until_all:.3f} until"
        f" all ended), first token {first:.1f} ms, {same} prompts as the first server"
    )


def _split(text: str, flag: str, form: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ConfigError(flag, f"{text!r} should be {form}")
    return name, value


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets and ports
        return False


def _json_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError("--request", f"{text!r} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("--request", f"{text!r} should be a JSON object")
    return fields
