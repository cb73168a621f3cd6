"""Compare chosen draft lengths with plain decoding and with fixed lengths, on services that run already.

    python tools/compare_draft_lengths.py CHOSEN [FIXED] --users 1 --users 32

CHOSEN is the address of a coordinator with `draft_length: auto`, FIXED that of one with `draft_length: fixed`, both on
the same target and draft; without FIXED there are two arms, chosen and plain. The arms take turns, so that a machine
that slows down slows them all; each has requests that are not measured first. In each turn the arms' prompts end in the
same tokens, after which a synthetic pair generates the same text; their other tokens differ, so that no prompt is in a
prefix cache. `scripts/draft_lengths.sh` starts all of it.

Three times a token are given, chosen/plain: `stream` is the mean over streams of (last - first) / (tokens - 1); `all`
is the time until all have finished, prefill included, by the tokens of one user; `decode` is the same without the time
that the same load takes with one token a request.
"""

import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from outrider.benchmarks.serving.client_processes import ClientProcesses
from outrider.benchmarks.serving.load import Decoding
from outrider.benchmarks.serving.records import Run
from outrider.benchmarks.serving.workload import Prompt, Traffic, random_prompts
from outrider.client import AsyncClient

CHOSEN, PLAIN = "chosen", "plain"

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode."""

    name: str
    clients: ClientProcesses
    decoding: Decoding


@dataclass(frozen=True, slots=True)
class Row:
    """What the arms came to with so many users."""

    num_users: int
    rates: dict[str, float]
    """Tokens a second, of all users together."""
    first_token_ms: dict[str, float]
    stream_ms: dict[str, float]
    """Mean over streams of (last - first) / (tokens - 1)."""
    all_ms: dict[str, float]
    """A token of one user, until all have finished."""
    decode_ms: dict[str, float]
    """The same without the time of the load with one token a request."""
    mean_length: float
    """Drafted tokens a step, chosen."""
    client_load: float
    """Processor time of the busiest client process over the time of its run."""

    @property
    def over_plain(self) -> float:
        """Of the chosen lengths."""
        return self.rates[CHOSEN] / self.rates[PLAIN]

    @property
    def over_best(self) -> float:
        """Over the better of plain decoding and the best fixed length."""
        return self.rates[CHOSEN] / max(rate for name, rate in self.rates.items() if name != CHOSEN)


@dataclass(slots=True)
class Prompts:
    """Prompts of random tokens; no two sets are alike."""

    num_prompts: int
    length: int
    num_token_ids: int
    num_sets: int = 0

    def next_set(self, ends: tuple[int, ...] | None = None) -> tuple[Prompt, ...]:
        """Another set; with ``ends`` each prompt's last token is the one given."""
        self.num_sets += 1
        seed = 10_000 * self.num_prompts + self.num_sets
        found = random_prompts(self.num_prompts, self.length, self.num_token_ids, seed)
        if ends is None:
            return tuple(found)
        return tuple((*prompt[:-1], end) for prompt, end in zip(found, ends, strict=True))


async def compare(arms: tuple[Arm, ...], prompts: Prompts, num_users: int, *, runs: int, warmups: int) -> Row:
    """All arms in turn, `runs` times, with so many users at a time."""
    traffic = Traffic(max_concurrency=num_users)
    for arm in arms:
        for _ in range(warmups):
            await arm.clients.run_load(prompts.next_set()[:num_users], traffic, arm.decoding)
    one_token_s = await _one_token_s(arms[0], prompts, traffic)
    found: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for index in range(runs):
        ends = tuple(prompt[-1] for prompt in prompts.next_set())
        for arm in arms[:: 1 if index % 2 == 0 else -1]:
            decoding = replace(arm.decoding, seed=index)
            run = _whole(await arm.clients.run_load(prompts.next_set(ends), traffic, decoding), arm.name)
            found[arm.name].append(run)
    tokens = prompts.num_prompts // num_users * arms[0].decoding.max_tokens
    seconds = {name: statistics.median(run.duration for run in done) for name, done in found.items()}
    return Row(
        num_users,
        {name: statistics.median(run.output_throughput for run in done) for name, done in found.items()},
        {name: statistics.median(_first_tokens_ms(done)) for name, done in found.items()},
        {name: statistics.mean(_stream_ms(done)) for name, done in found.items()},
        {name: 1e3 * value / tokens for name, value in seconds.items()},
        {name: 1e3 * (value - one_token_s) / (tokens - 1) for name, value in seconds.items()},
        _mean_length(found[CHOSEN]),
        max(run.client_load for done in found.values() for run in done),
    )


async def _one_token_s(arm: Arm, prompts: Prompts, traffic: Traffic) -> float:
    decoding = replace(arm.decoding, max_tokens=1)
    done = [await arm.clients.run_load(prompts.next_set(), traffic, decoding) for _ in range(2)]
    return statistics.median(_whole(run, arm.name).duration for run in done)


def _whole(run: Run, name: str) -> Run:
    failed = [record.error for record in run.records if record.error]
    if failed:
        raise RuntimeError(f"{name}: {len(failed)} requests failed, the first with {failed[0]}")
    return run


def _stream_ms(runs: list[Run]) -> list[float]:
    times = (record.time_per_output_token for run in runs for record in run.completed)
    return [1e3 * seconds for seconds in times if seconds is not None]


def _first_tokens_ms(runs: list[Run]) -> list[float]:
    times = (record.time_to_first_token for run in runs for record in run.completed)
    return [1e3 * seconds for seconds in times if seconds is not None]


def _mean_length(runs: list[Run]) -> float:
    told = [record.result.speculation for run in runs for record in run.completed if record.result is not None]
    num_steps = sum(found.num_steps for found in told)
    return sum(found.num_draft_tokens for found in told) / num_steps if num_steps else 0.0


def table(rows: list[Row]) -> str:
    """One line for each number of users; K=4 is a fixed length of 4."""
    names = "".join(f"{name:>9}" for name in rows[0].rates)
    lines = [
        "tokens/s, greedy or sampled as asked; times in ms, chosen/plain",
        f"users{names}  /plain   /best  drafted a step"
        "  first token         stream            all         decode  client",
    ]
    for row in rows:
        rates = "".join(f"{rate:9.1f}" for rate in row.rates.values())
        times = [row.first_token_ms, row.stream_ms, row.all_ms, row.decode_ms]
        pairs = "".join(f"  {f'{found[CHOSEN]:.2f}/{found[PLAIN]:.2f}':>13}" for found in times)
        ratios = f"{row.over_plain:8.3f}{row.over_best:8.3f}{row.mean_length:16.2f}"
        lines.append(f"{row.num_users:5d}{rates}{ratios}{pairs}  {row.client_load:6.2f}")
    return "\n".join(lines)


async def _compare_all(
    addresses: tuple[str, str | None],
    users: list[int],
    decoding: Decoding,
    fixed_lengths: list[int],
    shape: tuple[int, int, int, int, int],
) -> list[Row]:
    input_len, rounds, runs, warmups, num_processes = shape
    rows = []
    async with AsyncExitStack() as stack:
        info = await (await stack.enter_async_context(AsyncClient(addresses[0]))).model_info()
        if info.draft_length_mode != "auto" or not info.draft_attached:
            raise typer.BadParameter(f"{addresses[0]} has draft_length {info.draft_length_mode}, not auto and a draft")
        chosen, *fixed = [
            await stack.enter_async_context(ClientProcesses(address, num_processes)) for address in addresses if address
        ]
        arms = (
            Arm(CHOSEN, chosen, decoding),
            Arm(PLAIN, chosen, replace(decoding, num_speculative_tokens=0)),
            *(Arm(f"K={k}", c, replace(decoding, num_speculative_tokens=k)) for c in fixed for k in fixed_lengths),
        )
        for num_users in users:
            prompts = Prompts(num_users * rounds, input_len, info.num_token_ids)
            rows.append(await compare(arms, prompts, num_users, runs=runs, warmups=warmups))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


@app.command()
def main(
    chosen: str,
    fixed: Annotated[str | None, typer.Argument()] = None,
    *,
    users: Annotated[list[int], typer.Option(help="Numbers of users, one after the other.")],
    fixed_length: Annotated[list[int] | None, typer.Option(min=1, help="Draft tokens of a fixed arm each; 4.")] = None,
    input_len: Annotated[int, typer.Option(min=1)] = 128,
    output_len: Annotated[int, typer.Option(min=2)] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each user in a run.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm, in turn.")] = 3,
    warmups: Annotated[int, typer.Option(min=0, help="Runs of each arm that are not measured.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    client_processes: Annotated[int, typer.Option(min=1, help="Processes that send the requests.")] = 4,
) -> None:
    """Print the table, last."""
    decoding = Decoding(max_tokens=output_len, temperature=temperature, top_p=top_p, top_k=top_k)
    shape = (input_len, rounds, runs, warmups, client_processes)
    rows = asyncio.run(_compare_all((chosen, fixed), users, decoding, fixed_length or [4], shape))
    print(table(rows))


if __name__ == "__main__":
    app()
