"""KV pages that are filled once before memory is measured: a page takes memory when it is first written."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from outrider import AsyncClient
from outrider.errors import CapacityError
from tests.faults.processes import Process

_PAGE_SIZE = 16
_PROMPT_TOKENS = 1500
_OUTPUT_TOKENS = 40
_VOCABULARY = 2000


async def touch_pages(client: AsyncClient, process: Process, *, num_sharing: int = 1) -> int:
    """Run long prompts, no two alike, that together need every page; the most pages of ``process`` in use at a time.

    ``num_sharing`` processes of as many pages share the prompts.
    """
    metrics = await process.metrics() or {}
    num_pages = int(metrics["outrider_kv_pages_free"] + metrics["outrider_kv_pages_used"])
    count = num_sharing * (math.ceil(num_pages * _PAGE_SIZE / (_PROMPT_TOKENS + _OUTPUT_TOKENS)) + 1)
    async with _most_used(process) as most:
        await asyncio.gather(*(_fill(client, number) for number in range(count)))
    return most[0]


async def _fill(client: AsyncClient, number: int) -> None:
    prompt = [2 + (number * 131 + place * 7) % _VOCABULARY for place in range(_PROMPT_TOKENS)]
    with contextlib.suppress(CapacityError):
        await client.generate(prompt_token_ids=prompt, max_tokens=_OUTPUT_TOKENS, temperature=0, ignore_eos=True)


@contextlib.asynccontextmanager
async def _most_used(process: Process) -> AsyncIterator[list[int]]:
    most = [0]

    async def look() -> None:
        while True:
            metrics = await process.metrics() or {}
            most[0] = max(most[0], int(metrics.get("outrider_kv_pages_used", 0)))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(look())
    try:
        yield most
    finally:
        task.cancel()
