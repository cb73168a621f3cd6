"""Output collector: the deltas of a stream, and when their text is made."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import DeadlineError
from outrider.generation import Delta
from outrider.types import TokenLogprob
from outrider_coordinator.requests.output_collector import MAX_UNREAD_TOKENS, OutputCollector


class Texts:
    """Text that becomes final."""

    def __init__(self) -> None:
        self.final = ""
        self.num_taken = 0

    def take(self, num_tokens: int | None) -> str:
        taken, self.final = self.final, ""
        self.num_taken += 1
        return taken


async def read(collector: OutputCollector) -> list[Delta]:
    return [delta async for delta in collector.deltas()]


def logprobs_of(*token_ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id, -1.0, 1) for token_id in token_ids)


async def test_nothing_is_read_and_no_text_made_before_it_is_released() -> None:
    texts = Texts()
    collector = OutputCollector(texts.take)
    reader = asyncio.ensure_future(anext(collector.deltas()))
    await asyncio.sleep(0)
    collector.put((1, 2), logprobs_of(1, 2))
    texts.final = "ab"
    await asyncio.sleep(0)
    assert not reader.done()
    assert texts.num_taken == 0
    collector.release()
    assert await reader == Delta("ab", (1, 2), logprobs_of(1, 2))


async def test_a_slow_reader_gets_several_steps_at_once() -> None:
    texts = Texts()
    collector = OutputCollector(texts.take)
    for number in range(3):
        collector.put((number,), logprobs_of(number))
        texts.final += "abc"[number]
        collector.release()
    collector.end(DeadlineError("the time is up"))
    deltas: list[Delta] = []
    with pytest.raises(DeadlineError):
        async for delta in collector.deltas():
            deltas.append(delta)
    assert deltas == [Delta("abc", (0, 1, 2), logprobs_of(0, 1, 2))]


async def test_an_error_without_output_is_raised_at_once() -> None:
    collector = OutputCollector(Texts().take)
    reader = asyncio.ensure_future(read(collector))
    await asyncio.sleep(0)
    collector.end(DeadlineError("the time is up"))
    with pytest.raises(DeadlineError):
        await reader


@pytest.mark.parametrize("waits", [True, False])
async def test_a_reader_that_waits_is_not_behind_however_much_comes_at_once(waits: bool) -> None:
    """A message may have the tokens of many steps."""
    collector, behind = OutputCollector(Texts().take), []
    collector.on_behind = lambda: behind.append(True)
    reader = asyncio.ensure_future(anext(collector.deltas())) if waits else None
    await asyncio.sleep(0)
    collector.put(range(MAX_UNREAD_TOKENS))
    collector.release()
    assert bool(behind) is not waits
    if reader is not None:
        assert len((await reader).token_ids) == MAX_UNREAD_TOKENS
