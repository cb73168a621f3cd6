"""Compare chosen draft lengths with plain decoding while the number of users changes, on services that run already.

Each phase is USERSxREQUESTS: a number of users, each with a number of requests one after the other. The phases follow
each other without a pause; the arms, speculation (chosen lengths) and baseline (plain), take turns. One line for each
phase: tokens/s until all of it have finished, first-token times, drafted tokens a step. A result may be saved
for each phase, and the coordinator's metrics say how often the mode changed between plain and drafted steps.
"""

from __future__ import annotations

import re
import secrets
import statistics
import urllib.request
from dataclasses import dataclass, replace

from outrider.benchmarks.schema import save as save_result
from outrider.benchmarks.serving.client_processes import ClientProcesses
from outrider.benchmarks.serving.gate import check_exactness
from outrider.benchmarks.serving.load import Decoding
from outrider.benchmarks.serving.records import Run
from outrider.benchmarks.serving.run import BASELINE, SPECULATION, ServeOutcome, ServePlan, to_result
from outrider.benchmarks.serving.workload import Prompt, Traffic, random_prompts
from outrider.cli.bench.pairs import exact_within, find_pair
from outrider.client import AsyncClient
from outrider.errors import ConfigError

CHOSEN, PLAIN = SPECULATION, BASELINE
_HEADS = (
    "tokens/s and TTFT in ms, with chosen draft lengths and plain\n"
    "   phase    chosen     plain  speedup  TTFT chosen/plain, ratio  draft tokens a step"
)
_MODE_CHANGES = re.compile(r"^outrider_draft_length_mode_changes_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of users, each with requests one after the other."""

    num_users: int
    num_requests: int

    @property
    def name(self) -> str:
        """Name as in the flag."""
        return f"{self.num_users}x{self.num_requests}"


def parse_phase(text: str) -> Phase:
    """A phase from USERSxREQUESTS."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError("--phase", f"{text!r} should be USERSxREQUESTS, such as 128x2")
    return Phase(int(found[1]), int(found[2]))


async def play(clients: ClientProcesses, phases: list[list[Prompt]], users: list[int], decoding: Decoding) -> list[Run]:
    """All phases, one after the other; prompts are of a cache salt of their own."""
    salted = replace(decoding, cache_salt=secrets.token_hex(8))
    runs = []
    for prompts, num_users in zip(phases, users, strict=True):
        run = await clients.run_load(prompts, Traffic(max_concurrency=num_users), salted)
        failed = [record.error for record in run.records if record.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
        runs.append(run)
    return runs


def line_of(phase: Phase, chosen: list[Run], plain: list[Run]) -> str:
    """Figures of one phase: medians over runs, and of the first-token times over requests."""
    rates = [statistics.median(run.output_throughput for run in runs) for runs in (chosen, plain)]
    firsts = [statistics.median(_first_tokens_ms(runs)) for runs in (chosen, plain)]
    steps = [record.result.speculation for run in chosen for record in run.completed if record.result is not None]
    drafted = sum(found.num_draft_tokens for found in steps) / sum(found.num_steps for found in steps)
    return (
        f"{phase.name:>8} {rates[0]:9.1f} {rates[1]:9.1f} {rates[0] / rates[1]:8.3f}  "
        f"{firsts[0]:10.1f}/{firsts[1]:.1f} {firsts[0] / firsts[1]:7.3f} {drafted:20.2f}"
    )


def _first_tokens_ms(runs: list[Run]) -> list[float]:
    times = (record.time_to_first_token for run in runs for record in run.completed)
    return [1e3 * seconds for seconds in times if seconds is not None]


def _mode_changes(url: str | None) -> float:
    if url is None:
        return 0.0
    with urllib.request.urlopen(url, timeout=5) as answer:
        return sum(float(value) for value in _MODE_CHANGES.findall(answer.read().decode()))


async def compare(
    address: str,
    phases: list[Phase],
    decoding: Decoding,
    *,
    input_len: int,
    runs: int,
    metrics: str | None,
    save: tuple[str, str] | None,
) -> None:
    """Play both arms in turn and print the table."""
    async with AsyncClient(address) as client, ClientProcesses(address, 8) as clients:
        info = await client.model_info()
        prompts = [
            random_prompts(phase.num_users * phase.num_requests, input_len, info.num_token_ids, seed)
            for seed, phase in enumerate(phases)
        ]
        plans = [
            ServePlan(
                tuple(sent), Traffic(max_concurrency=phase.num_users), decoding, num_runs=runs, with_baseline=True
            )
            for sent, phase in zip(prompts, phases, strict=True)
        ]
        users = [phase.num_users for phase in phases]
        arms = {CHOSEN: decoding, PLAIN: replace(decoding, num_speculative_tokens=0)}
        done: dict[str, list[list[Run]]] = {CHOSEN: [], PLAIN: []}
        changes = 0.0
        for arm in arms.values():
            await clients.run_load(prompts[0][: users[0]], Traffic(max_concurrency=users[0]), arm)
        for index in range(runs):
            for name in list(arms)[:: 1 if index % 2 == 0 else -1]:
                before = _mode_changes(metrics)
                done[name].append(await play(clients, prompts, users, arms[name]))
                changes += _mode_changes(metrics) - before if name == CHOSEN else 0
        print(_HEADS)
        for place, phase in enumerate(phases):
            print(line_of(phase, [found[place] for found in done[CHOSEN]], [found[place] for found in done[PLAIN]]))
        if save is not None:
            device, name = save
            gate = await check_exactness(
                client, prompts[0][:2], max_tokens=32, num_speculative_tokens=None,
                tie_tolerance=exact_within(device, "auto"),
            )  # fmt: skip
            where = find_pair(None, None, address)
            facts = {"pair": where.pair(info), **where.weights(info)}
            for place, phase in enumerate(phases):
                runs_of = {arm: tuple(found[place] for found in done[arm]) for arm in arms}
                outcome = ServeOutcome(info, gate, info.num_speculative_tokens, runs_of)
                named = f"{name}-{place + 1}-{phase.name}"
                save_result(to_result(outcome, plans[place], name=named, device=device, configuration=facts))
        if metrics is not None:
            print(f"changes between plain and drafted steps in a run with chosen lengths: {changes / runs:g}")
