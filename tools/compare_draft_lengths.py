"""Compare chosen draft lengths with plain decoding and with one fixed length, on services that run already.

    python tools/compare_draft_lengths.py CHOSEN FIXED --users 1 --users 32

CHOSEN is the address of a coordinator with `draft_length: auto`, FIXED that of one with `draft_length: fixed`, both on
the same target and draft. The arms take turns, so that a machine that slows down slows them all; each has requests that
are not measured first. `scripts/draft_lengths.sh` starts all of it.
"""

import asyncio
import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from outrider.benchmarks.serving.load import Decoding, Run, run_load
from outrider.benchmarks.serving.workload import Prompt, Traffic, random_prompts
from outrider.client import AsyncClient

CHOSEN, PLAIN, FIXED = "chosen", "plain", "fixed"

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode."""

    name: str
    client: AsyncClient
    decoding: Decoding


@dataclass(frozen=True, slots=True)
class Row:
    """What the arms came to with so many users."""

    num_users: int
    rates: dict[str, float]
    """Tokens a second, of all users together."""
    first_token_ms: dict[str, float]
    mean_length: float
    """Drafted tokens a step, chosen."""

    @property
    def over_plain(self) -> float:
        """Of the chosen lengths."""
        return self.rates[CHOSEN] / self.rates[PLAIN]

    @property
    def over_best(self) -> float:
        """Over the better of plain decoding and the fixed length."""
        return self.rates[CHOSEN] / max(self.rates[PLAIN], self.rates[FIXED])


async def compare(
    arms: tuple[Arm, ...], prompts: tuple[Prompt, ...], num_users: int, *, runs: int, warmups: int
) -> Row:
    """All arms in turn, `runs` times, with so many users at a time."""
    traffic = Traffic(max_concurrency=num_users)
    for arm in arms:
        for _ in range(warmups):
            await run_load(arm.client, prompts[:num_users], traffic, arm.decoding)
    found: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for index in range(runs):
        for arm in arms[:: 1 if index % 2 == 0 else -1]:
            decoding = replace(arm.decoding, seed=index)
            run = await run_load(arm.client, prompts, traffic, decoding)
            failed = [record.error for record in run.records if record.error]
            if failed:
                raise RuntimeError(f"{arm.name}: {len(failed)} requests failed, the first with {failed[0]}")
            found[arm.name].append(run)
    return Row(
        num_users,
        {name: statistics.median(run.output_throughput for run in done) for name, done in found.items()},
        {name: statistics.median(_first_tokens_ms(done)) for name, done in found.items()},
        _mean_length(found[CHOSEN]),
    )


def _first_tokens_ms(runs: list[Run]) -> list[float]:
    times = (record.time_to_first_token for run in runs for record in run.completed)
    return [1e3 * seconds for seconds in times if seconds is not None]


def _mean_length(runs: list[Run]) -> float:
    told = [record.result.speculation for run in runs for record in run.completed if record.result is not None]
    num_steps = sum(found.num_steps for found in told)
    return sum(found.num_draft_tokens for found in told) / num_steps if num_steps else 0.0


def table(rows: list[Row], fixed_length: int) -> str:
    """One line for each number of users."""
    lines = [
        f"tokens/s, greedy or sampled as asked; fixed: {fixed_length} draft tokens",
        "users   chosen    plain    fixed  /plain   /best  drafted a step  first token ms chosen/plain",
    ]
    for row in rows:
        rates = "".join(f"{row.rates[name]:9.1f}" for name in (CHOSEN, PLAIN, FIXED))
        first = f"{row.first_token_ms[CHOSEN]:.1f}/{row.first_token_ms[PLAIN]:.1f}"
        lines.append(
            f"{row.num_users:5d}{rates}{row.over_plain:8.3f}{row.over_best:8.3f}{row.mean_length:16.2f}  {first}"
        )
    return "\n".join(lines)


async def _compare_all(
    addresses: tuple[str, str],
    users: list[int],
    decoding: Decoding,
    fixed_length: int,
    shape: tuple[int, int, int, int],
) -> list[Row]:
    input_len, rounds, runs, warmups = shape
    rows = []
    async with AsyncClient(addresses[0]) as chosen, AsyncClient(addresses[1]) as fixed:
        info = await chosen.model_info()
        if info.draft_length_mode != "auto" or not info.draft_attached:
            raise typer.BadParameter(f"{addresses[0]} has draft_length {info.draft_length_mode}, not auto and a draft")
        arms = (
            Arm(CHOSEN, chosen, decoding),
            Arm(PLAIN, chosen, replace(decoding, num_speculative_tokens=0)),
            Arm(FIXED, fixed, replace(decoding, num_speculative_tokens=fixed_length)),
        )
        for num_users in users:
            prompts = tuple(random_prompts(num_users * rounds, input_len, info.num_token_ids, num_users))
            rows.append(await compare(arms, prompts, num_users, runs=runs, warmups=warmups))
            print(table(rows[-1:], fixed_length).splitlines()[-1], flush=True)
    return rows


@app.command()
def main(
    chosen: str,
    fixed: str,
    *,
    users: Annotated[list[int], typer.Option(help="Numbers of users, one after the other.")],
    fixed_length: Annotated[int, typer.Option(min=1, help="Draft tokens of the fixed arm.")] = 4,
    input_len: Annotated[int, typer.Option(min=1)] = 128,
    output_len: Annotated[int, typer.Option(min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each user in a run.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm, in turn.")] = 3,
    warmups: Annotated[int, typer.Option(min=0, help="Runs of each arm that are not measured.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> None:
    """Print the table, last."""
    decoding = Decoding(max_tokens=output_len, temperature=temperature)
    shape = (input_len, rounds, runs, warmups)
    rows = asyncio.run(_compare_all((chosen, fixed), users, decoding, fixed_length, shape))
    print(table(rows, fixed_length))


if __name__ == "__main__":
    app()
