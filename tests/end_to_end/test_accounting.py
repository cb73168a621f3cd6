"""Accounting: after any mix of finishing, cancelling, failing and stopping every page is free on both services."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outrider.errors import DeadlineError, InvalidRequestError
from tests.end_to_end.faults import break_links, gate_of, outage
from tests.end_to_end.waiting import Reader, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
NEAR_DRAFT = TARGET
FAR_DRAFT = cached_tiny_model("qwen2", seed=9)
LONGEST = 40
PROMPTS = [[(31 * i + 7 * j) % 256 for j in range(1 + 9 * i)] for i in range(8)]
PATIENT: dict[str, Any] = {"draft_timeout_ms": 60_000}
SMALL: dict[str, Any] = {"max_batched_tokens": 24, "page_size": 4}

Plain = dict[tuple[int, ...], tuple[int, ...]]


async def plain_outputs(stack: Stack) -> Plain:
    """Greedy output of the target alone after each prompt."""
    plain: Plain = {}
    for prompt in PROMPTS:
        result = await stack.generate(
            prompt_token_ids=prompt, max_tokens=LONGEST, temperature=0, ignore_eos=True, num_speculative_tokens=0
        )
        plain[tuple(prompt)] = result.token_ids
    return plain


class User:
    """Asks for one thing after another, each a random one, and checks what comes."""

    def __init__(self, stack: Stack, source: random.Random, plain: Plain, seen: Counter[str]) -> None:
        self._stack, self._source, self._plain, self._seen = stack, source, plain, seen

    async def ask(self) -> None:
        ways: list[Callable[[dict[str, Any]], Awaitable[None]]] = [
            *(self._finish, self._finish, self._leave, self._leave, self._leave_at_once, self._be_late),
            *(self._stop_at_text, self._stop_at_token, self._fail, self._ask_badly),
        ]
        way = self._source.choice(ways)
        await way(self._options())
        self._seen[way.__name__.strip("_")] += 1

    def _options(self) -> dict[str, Any]:
        source = self._source
        return {
            "prompt_token_ids": source.choice(PROMPTS),
            "max_tokens": source.randint(1, LONGEST),
            "temperature": source.choice([0, 0, 1.0]),
            "num_speculative_tokens": source.choice([None, 0, 1, 3, 6]),
            "acceptance_method": source.choice(["rejection", "coupled", "typical"]),
            "ignore_eos": True,
            "logprobs": source.choice([None, None, 2]),
            "prompt_logprobs": source.choice([None, None, None, 1]),
        }

    def _check(self, options: dict[str, Any], token_ids: tuple[int, ...]) -> None:
        if options["temperature"] == 0:
            plain = self._plain[tuple(options["prompt_token_ids"])]
            assert token_ids == plain[: len(token_ids)]

    async def _finish(self, options: dict[str, Any]) -> None:
        result = await self._stack.generate(**options)
        self._check(options, result.token_ids)
        assert len(result.token_ids) == options["max_tokens"]

    async def _leave(self, options: dict[str, Any]) -> None:
        reader = Reader(self._stack, **{**options, "max_tokens": LONGEST})
        await reader.read(self._source.randint(1, 8))
        self._check(options, reader.token_ids)
        await reader.close()

    async def _leave_at_once(self, options: dict[str, Any]) -> None:
        task = asyncio.create_task(self._stack.generate(**options))
        for _ in range(self._source.randint(0, 6)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async def _be_late(self, options: dict[str, Any]) -> None:
        try:
            result = await self._stack.generate(**options, timeout=self._source.choice([0.001, 0.004, 0.02]))
            self._check(options, result.token_ids)
        except DeadlineError:
            self._seen["deadlines"] += 1

    async def _stop_at_text(self, options: dict[str, Any]) -> None:
        result = await self._stack.generate(**options, stop=list("aeiou rst,.()"))
        self._check(options, result.token_ids)

    async def _stop_at_token(self, options: dict[str, Any]) -> None:
        stops = self._source.sample(range(256), 40)
        result = await self._stack.generate(**options, stop_token_ids=stops)
        self._check(options, result.token_ids)

    async def _fail(self, options: dict[str, Any]) -> None:
        """Request whose second token cannot be drawn: the only one that is allowed would complete a bad word."""
        options |= {"max_tokens": 9, "allowed_token_ids": [64], "bad_words": ["aa"]}
        with pytest.raises(InvalidRequestError, match="leaves no token"):
            await self._stack.generate(**options)

    async def _ask_badly(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError):
            await self._stack.generate(**{**options, "prompt_token_ids": [300]})


async def soak(stack: Stack, *, num_requests: int, num_users: int, seed: int) -> Counter[str]:
    plain = await plain_outputs(stack)
    left, seen = iter(range(num_requests)), Counter[str]()

    async def keep_asking(user: User) -> None:
        for _ in left:
            await user.ask()

    users = [User(stack, random.Random(f"{seed}/{index}"), plain, seen) for index in range(num_users)]
    disturbing = asyncio.create_task(disturb(stack, seen, num_requests))
    await asyncio.gather(*map(keep_asking, users))
    await disturbing
    await all_free(stack)
    assert sum(count for way, count in seen.items() if way not in {"deadlines", "outages"}) == num_requests
    # What it went through did it no harm.
    for prompt, token_ids in plain.items():
        after = await stack.generate(prompt_token_ids=prompt, max_tokens=LONGEST, temperature=0, ignore_eos=True)
        assert after.token_ids == token_ids
    await all_free(stack)
    return seen


async def disturb(stack: Stack, seen: Counter[str], num_requests: int) -> None:
    """The draft is lost, and is back, again and again; in process the target is too."""
    for num_done in (num_requests // 5, num_requests // 3, num_requests // 2):
        await have_ended(seen, num_done)
        if stack.client is not None:
            async with outage(stack, "draft"):
                await have_ended(seen, seen.total() + 3)
        else:
            break_links(stack.draft)
            break_links(stack.target)
        seen["outages"] += 1
    await eventually(lambda: stack.coordinator.services.draft.is_up, "the draft back")  # type: ignore[union-attr]


async def have_ended(seen: Counter[str], num_requests: int) -> None:
    await eventually(lambda: seen.total() >= num_requests, f"the end of {num_requests} requests")


@pytest.mark.parametrize("draft", [NEAR_DRAFT, FAR_DRAFT], ids=["near", "far"])
async def test_any_mix_of_endings_leaves_every_page_free(draft: Any) -> None:
    small = {**SMALL, "num_pages": 120}  # a few long requests fill it: some have to wait for pages
    async with run_stack(
        TARGET, draft, wire=False, target_settings=small, draft_settings=small, max_running_requests=10, **PATIENT
    ) as stack:
        seen = await soak(stack, num_requests=200, num_users=14, seed=5)
        assert set(seen) > {"finish", "leave", "leave_at_once", "be_late", "stop_at_text", "stop_at_token", "fail"}
        stats = stats_of(stack.coordinator)
        assert stats.spec_stats.num_accepted_tokens > 0
        assert stats.num_cancelled > 0 < stats.num_expired
        assert stats.num_failed > 0


async def test_any_mix_of_endings_leaves_every_page_free_over_grpc() -> None:
    small = {**SMALL, "num_pages": 120}
    async with run_stack(
        TARGET, NEAR_DRAFT, wire=True, target_settings=small, draft_settings=small, max_running_requests=10, **PATIENT
    ) as stack:
        await soak(stack, num_requests=60, num_users=8, seed=6)


async def test_ngram_drafts_leave_no_session_behind() -> None:
    async with run_stack(TARGET, "ngram", wire=False, draft_settings={"prompt_lookup_min": 1}, **PATIENT) as stack:
        await soak(stack, num_requests=40, num_users=8, seed=7)


@pytest.mark.parametrize("wire", [False, True], ids=["in process", "over grpc"])
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_stream_that_is_left_frees_its_pages_within_one_step(role: str, wire: bool) -> None:
    async with run_stack(TARGET, NEAR_DRAFT, wire=wire, **PATIENT) as stack:
        runner = getattr(stack, role).runner
        with gate_of(runner) as gate:
            reader = Reader(stack, prompt_token_ids=[1, 2, 3], max_tokens=200, temperature=0, ignore_eos=True)
            await reader.read(5)
            await gate.shut()
            before = stack.target.runner.num_forwards, runner.num_forwards
            links = getattr(stack, role).thread.links
            num_sent = sum(link.num_sent for link in links)
            await reader.close()
            await eventually(lambda: stats_of(stack.coordinator).num_cancelled == 1)
            await eventually(lambda: sum(link.num_sent for link in links) > num_sent, "a release")
            gate.open()
            await all_free(stack)
        # The forward that was under way, and on the draft over a wire at most the rest of its proposal.
        assert stack.target.runner.num_forwards - before[0] <= 1
        assert runner.num_forwards - before[1] <= (4 if role == "draft" and wire else 1)


@pytest.mark.parametrize("wire", [False, True], ids=["in process", "over grpc"])
async def test_a_deadline_frees_pages_within_one_step(wire: bool) -> None:
    async with run_stack(TARGET, NEAR_DRAFT, wire=wire, **PATIENT) as stack:
        runner = stack.target.runner
        await stack.generate(prompt_token_ids=[1], max_tokens=8)  # what is made only once has been made
        with gate_of(runner) as gate:
            reader = Reader(
                stack, prompt_token_ids=[1, 2, 3], max_tokens=200, temperature=0, ignore_eos=True, timeout=5.0
            )
            await reader.read(5)
            await gate.shut()
            before = runner.num_forwards
            with pytest.raises(DeadlineError):
                await reader.finish()
            await eventually(lambda: stats_of(stack.coordinator).num_running == 0)
            gate.open()
            await all_free(stack)
        assert runner.num_forwards - before <= 1


async def test_a_request_that_waits_can_be_left_too() -> None:
    async with run_stack(TARGET, NEAR_DRAFT, wire=False, max_running_requests=1, **PATIENT) as stack:
        with gate_of(stack.target.runner) as gate:
            running = Reader(stack, prompt_token_ids=[1, 2], max_tokens=20, temperature=0, ignore_eos=True)
            reading = asyncio.create_task(running.finish())
            await gate.shut()
            waiting = asyncio.create_task(stack.generate(prompt_token_ids=[3], max_tokens=20))
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 1)
            waiting.cancel()
            await eventually(lambda: stats_of(stack.coordinator).num_waiting == 0)
            gate.open()
            assert len((await reading).result.token_ids) == 20  # type: ignore[union-attr]
        await all_free(stack)
