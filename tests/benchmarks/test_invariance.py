"""Comparison of the same requests in different company."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
import typer

from outrider.benchmarks.invariance import REFERENCE, Arm, Workload, arms_of, compare, run_arms
from outrider.cli.bench.invariance import InvarianceFlags
from outrider.cli.bench.pairs import Where
from outrider.client import AsyncClient
from outrider.errors import ConfigError
from outrider.generation import GenerationResult


@dataclass
class Result:
    """Parts of a generation that are compared."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


def differences(expected: list[Result], found: list[Result]) -> Any:
    return compare(REFERENCE, cast("list[GenerationResult]", expected), cast("list[GenerationResult]", found))


def test_first_differences_are_counted_among_the_tokens_up_to_them() -> None:
    found = differences([Result((1, 2, 3)), Result((4, 5, 6))], [Result((1, 2, 3)), Result((4, 7, 6))])
    assert (found.num_streams, found.num_differing, found.num_equal_tokens) == (2, 1, 4)
    assert found.per_10_000 == 2000


def test_equal_tokens_with_other_logprobs_are_told_apart() -> None:
    found = differences([Result((1,), (-0.5,)), Result((2,), (-1.0,))], [Result((1,), (-0.25,)), Result((2,), (-1.0,))])
    assert (found.num_differing, found.num_other_logprobs, found.per_10_000) == (0, 1, 0)


def test_each_batch_size_meets_each_draft_length_and_a_filled_cache() -> None:
    assert arms_of([1, 8], [0, 4]) == (
        Arm(1, 0), Arm(1, 4), Arm(8, 0), Arm(8, 4), Arm(1, 4, is_cached=True), Arm(8, 4, is_cached=True),
    )  # fmt: skip


class FollowsBatch:
    """A model whose tokens follow the number of requests under way."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    async def generate(self, **options: Any) -> Result:
        self.running += 1
        await asyncio.sleep(0)
        self.most = max(self.most, self.running)
        token = self.running
        await asyncio.sleep(0)
        self.running -= 1
        return Result((options["prompt_token_ids"][0], token))


async def test_output_that_follows_the_batch_is_found() -> None:
    """Negative control."""
    client, workload = FollowsBatch(), Workload(((1,), (2,), (3,)), max_tokens=2)
    alone, together = await run_arms(cast("AsyncClient", client), workload, [Arm(1, 4), Arm(3, 0)])
    assert alone.num_differing == 0
    assert together.num_differing == 3
    assert client.most == 3


async def test_preempted_sessions_are_those_of_the_arm() -> None:
    counts = iter((3, 3, 3, 10))

    async def count() -> int:
        return next(counts)

    workload, arms = Workload(((1,), (2,)), max_tokens=2), [Arm(1, 4), Arm(2, 0)]
    found = await run_arms(cast("AsyncClient", FollowsBatch()), workload, arms, count_preempted=count)
    assert [arm.num_preempted for arm in found] == [0, 7]


@pytest.mark.parametrize("port", ("abc", "1"))
async def test_a_port_without_metrics_is_named_before_any_request(port: str) -> None:
    where, client = Where(None, None, "127.0.0.1:1"), cast("AsyncClient", None)
    with pytest.raises(ConfigError, match=rf"--set target.metrics_port: has no metrics at 127.0.0.1:{port}: "):
        await InvarianceFlags().run(client, where, port)


def test_a_batch_that_the_requests_do_not_fill_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--batch-size 8 needs --num-prompts 8 or more"):
        _ = InvarianceFlags(batch_size=[1, 8], num_prompts=2).batch_sizes
    assert InvarianceFlags(num_prompts=20).batch_sizes == [1, 16]
