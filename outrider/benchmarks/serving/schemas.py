"""Interference of new JSON schemas: the longest gap of running streams while requests with schemas arrive.

Owns three arms, in turn: running requests alone, beside short requests, and beside the same requests with a schema each
that no service has compiled before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.benchmarks.serving.interference import Interval, gaps_within, whole
from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.workload import Prompt, Traffic
from outrider.client import AsyncClient
from outrider.errors import ConfigError, InvalidRequestError

ALONE, BESIDE_REQUESTS, BESIDE_SCHEMAS = "alone", "beside requests", "beside schemas"


@dataclass(frozen=True, slots=True)
class SchemaPlan:
    """Running streams, and the requests that arrive beside them."""

    running: tuple[Prompt, ...]
    decoding: Decoding
    schemas: tuple[str, ...]
    num_arriving: int = 100
    arrival_rate: float = 100.0
    """A second."""
    num_tokens: int = 2
    """Output length of each request that arrives."""
    num_runs: int = 3
    start_s: float = 0.5
    """Time after the beginning of a run when requests begin to arrive."""


@dataclass(slots=True)
class SchemaOutcome:
    """Milliseconds of all runs, by arm."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    longest: dict[str, list[float]] = field(default_factory=dict)
    """Longest gap of any stream, of each run."""
    num_refused: int = 0
    """Schemas with keywords that are not supported."""


def read_schemas(path: Path) -> tuple[str, ...]:
    """One schema a line, or objects with a ``schema``."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            given = json.loads(line)
            found.append(json.dumps(given.get("schema", given)))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("schemas", f"{path} has no JSON object a line: {error}") from error
    return tuple(found)


async def run_schemas(client: AsyncClient, plan: SchemaPlan) -> SchemaOutcome:
    """All arms, as often as the plan says."""
    outcome, schemas = SchemaOutcome(), _new_schemas(plan.schemas)
    await run_load(client, plan.running, Traffic(), plan.decoding)
    for _ in range(plan.num_runs):
        for arm in (ALONE, BESIDE_REQUESTS, BESIDE_SCHEMAS):
            chosen = list(itertools.islice(schemas, plan.num_arriving)) if arm == BESIDE_SCHEMAS else []
            gaps = await _gaps(client, plan, arm, chosen, outcome)
            outcome.gaps.setdefault(arm, []).extend(gaps)
            outcome.longest.setdefault(arm, []).append(max(gaps))
    return outcome


def _new_schemas(schemas: Sequence[str]) -> Iterator[str]:
    """The schemas again and again, each time as ones that are in no cache."""
    for number in itertools.count(time.time_ns()):
        for schema in schemas:
            yield json.dumps({**json.loads(schema), "$comment": str(number)})


async def _gaps(
    client: AsyncClient, plan: SchemaPlan, arm: str, schemas: Sequence[str], outcome: SchemaOutcome
) -> list[float]:
    began = time.perf_counter()
    running = asyncio.create_task(run_load(client, plan.running, Traffic(), plan.decoding, began=began))
    if arm == ALONE:
        interval = (0.0, float("inf"))
    else:
        await asyncio.sleep(plan.start_s)
        interval = await _arrive(client, plan, schemas, began, outcome)
    run = whole(await running)
    gaps = [1e3 * gap for record in run.records for gap in gaps_within(record, [interval])]
    if not gaps:
        raise ConfigError("output_len", "must be larger: the running requests ended before others arrived")
    return gaps


async def _arrive(
    client: AsyncClient, plan: SchemaPlan, schemas: Sequence[str], began: float, outcome: SchemaOutcome
) -> Interval:
    """Send the requests at the plan's rate; from the first one's start to the last one's end."""
    first = time.perf_counter()

    async def one(index: int) -> None:
        await asyncio.sleep(first + index / plan.arrival_rate - time.perf_counter())
        constrained: Any = {"json_schema": schemas[index]} if schemas else {}
        try:
            await client.generate(
                prompt_token_ids=plan.running[0][:8], max_tokens=plan.num_tokens, temperature=0.0, **constrained
            )
        except InvalidRequestError:
            outcome.num_refused += 1

    await asyncio.gather(*map(one, range(plan.num_arriving)))
    return first - began, time.perf_counter() - began
