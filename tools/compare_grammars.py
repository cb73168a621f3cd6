"""Compare the time of a token with and without a grammar, on services that run.

    outrider serve TARGET --draft-model DRAFT --port 50051 --no-http
    python tools/compare_grammars.py 127.0.0.1:50051 --users 1 --users 32 --users 128

Kinds of output: plain; text, one long JSON string; records, JSON of which keys and punctuation are forced. They take
turns, with the same prompts and numbers of tokens. Then plain streams beside one of each kind. Medians over rounds.
``--schemas FILE`` (one a line) adds the longest gap of streams while 100 new schemas arrive in a second.
"""

import asyncio
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.records import Run
from outrider.benchmarks.serving.schemas import SchemaPlan, read_schemas, run_schemas
from outrider.benchmarks.serving.workload import Prompt, Traffic, random_prompts
from outrider.client import AsyncClient
from outrider.types import Grammar, GrammarKind

_RECORD: dict[str, Any] = {
    "identifier": {"type": "integer", "minimum": 0, "maximum": 99999},
    "colour": {"enum": ["red", "green", "blue"]},
    "available": {"type": "boolean"},
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "records": {
        "type": "array",
        "items": {"type": "object", "properties": _RECORD, "required": [*_RECORD], "additionalProperties": False},
        "minItems": 50,
    },
}
_KINDS = ("plain", *_SCHEMAS)


def decoding_of(kind: str, num_tokens: int, draft_length: int | None) -> Decoding:
    """Parameters of the requests of a kind."""
    if kind == "plain":
        return Decoding(num_tokens, num_speculative_tokens=draft_length)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMAS[kind]))
    return Decoding(num_tokens, ignore_eos=False, num_speculative_tokens=draft_length, grammar=grammar)


def ms_per_token(run: Run) -> float:
    """Median over streams."""
    if failed := [record.error for record in run.records if record.error]:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return statistics.median(1e3 * time for record in run.completed if (time := record.time_per_output_token))


async def alone(client: AsyncClient, prompts: list[Prompt], kind: str, decoding: Decoding) -> float:
    """Milliseconds a token where all streams are of a kind."""
    return ms_per_token(await run_load(client, prompts, Traffic(), decoding))


async def beside(client: AsyncClient, prompts: list[Prompt], kind: str, decoding: Decoding) -> float:
    """Milliseconds a token of plain streams beside one of a kind that takes longer."""
    other = decoding_of(kind, 2 * decoding.max_tokens, decoding.num_speculative_tokens)
    one = asyncio.create_task(run_load(client, prompts[-1:], Traffic(), other))
    plain = decoding_of("plain", decoding.max_tokens, decoding.num_speculative_tokens)
    found = ms_per_token(await run_load(client, prompts[:-1], Traffic(), plain))
    await one
    return found


async def compare(address: str, users: list[int], num_tokens: int, rounds: int, draft_length: int | None) -> None:
    """Print a line for each number of users, and one more for streams beside one with a grammar."""
    async with AsyncClient(address) as client:
        info = await client.model_info()
        arms = [(alone, count) for count in users] + [(beside, max(users))] * (max(users) > 1)
        for measure, count in arms:
            times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
            for index in range(rounds + 1):  # the first warms up
                prompts = random_prompts(count, 32, info.num_token_ids, index)
                for kind in _KINDS:
                    decoding = decoding_of(kind, num_tokens, draft_length)
                    found = await measure(client, prompts, kind, decoding)
                    if index:
                        times[kind].append(found)
            medians = {kind: statistics.median(own) for kind, own in times.items()}
            ratios = "  ".join(f"{kind} {medians[kind] / medians['plain']:.3f}" for kind in _SCHEMAS)
            spread = f"{min(times['plain']):.3f}..{max(times['plain']):.3f}"
            print(f"{measure.__name__:<7} {count:>4} users  plain {medians['plain']:.3f} ms ({spread})  {ratios}")


async def compare_gaps(address: str, schemas: Path, num_streams: int = 8) -> None:
    """Print the longest gap of each run, of streams alone, beside requests and beside as many with new schemas."""
    async with AsyncClient(address) as client:
        info = await client.model_info()
        running = tuple(random_prompts(num_streams, 32, info.num_token_ids, 0))
        found = await run_schemas(client, SchemaPlan(running, Decoding(400), read_schemas(schemas)))
        for arm, longest in found.longest.items():
            gaps = ", ".join(f"{gap:.1f}" for gap in longest)
            print(f"{arm:<16} longest gaps {gaps} ms, median {statistics.median(found.gaps[arm]):.2f} ms")
        print(f"{found.num_refused} requests were refused, since keywords of their schemas are not supported")


def main(
    address: str,
    *,
    users: Annotated[list[int], typer.Option(min=1, help="May be repeated.")],
    output_len: Annotated[int, typer.Option(min=2)] = 96,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    draft_length: Annotated[int | None, typer.Option(min=0, help="Left out: the server's; 0: no drafts.")] = None,
    schemas: Annotated[Path | None, typer.Option(help="JSON schemas, one a line.")] = None,
) -> None:
    """Print the table."""
    asyncio.run(compare(address, users, output_len, rounds, draft_length))
    if schemas is not None:
        asyncio.run(compare_gaps(address, schemas))


if __name__ == "__main__":
    typer.run(main)
