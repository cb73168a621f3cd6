"""Output follows the target's exact joint distribution, through the real services and the real loop.

Four tokens are looked at together: the first is the prefill's, the three after it come of proposals of one to three
tokens, so from every place of a proposal, from residuals and from bonuses. Their distribution is enumerated from
transformers' logits. Seeds are fixed, so a run says the same every time.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.ports import Proposal
from outrider.randomness import scalar
from outrider.randomness.streams import Stream
from outrider.sampling import proposing
from outrider.sampling.rows import LogitRow
from outrider.types import SamplingParams, SparseEvidence
from tests.support.coordinator_stats import stats_of
from tests.support.service_rig import ServiceRig
from tests.support.small_models import PROMPT, VOCAB_SIZE, SmallModels, build_small_models
from tests.support.stack import run_stack
from tests.support.statistics import cells, chi_square_p, joint_law

LENGTH = 4
PLAIN: dict[str, Any] = {}
TRUNCATIONS: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}]
FORMS: dict[str, dict[str, Any]] = {
    "sparse": {"acceptance_method": "rejection"},
    "coupled": {"acceptance_method": "coupled"},
}
GREEDY_DRAFTS = "greedy drafts"
DRAFTS = ["good", "bad", "ngram"]
SUPPORT_LIMIT = 3
"""Support limit, of five tokens, so that much lies outside the support."""
LEAST_P, CAUGHT_P = 1e-4, 1e-6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(tmp_path_factory.mktemp("models"))


@cache
def distribution_of(folder: Path, sampling: tuple[tuple[str, Any], ...]) -> np.ndarray[Any, Any]:
    return joint_law(folder, PROMPT, SamplingParams(temperature=1.0, **dict(sampling)), LENGTH)


def p_value(folder: Path, sampling: dict[str, Any], outputs: list[list[int]]) -> float:
    distribution = distribution_of(folder, tuple(sampling.items()))
    return chi_square_p(cells([output[:LENGTH] for output in outputs], VOCAB_SIZE), distribution)


def requests(count: int, sampling: dict[str, Any], *, first_seed: int = 0) -> Iterator[dict[str, Any]]:
    """Requests with proposals of one, two and three tokens in turn."""
    for seed in range(first_seed, first_seed + count):
        yield {
            "prompt_token_ids": PROMPT,
            "max_tokens": LENGTH + 1,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
            "num_speculative_tokens": 1 + seed % 3,
            **sampling,
        }


def interleaved(count: int, samplings: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One of each sampling in turn, so that they share forwards; every request has a seed of its own."""
    streams = [requests(count, sampling, first_seed=i * count) for i, sampling in enumerate(samplings)]
    return itertools.chain.from_iterable(zip(*streams, strict=True))


def report(*parts: object) -> None:
    """Shown when a test fails, and with -rP."""
    sys.stdout.write(f"{parts}\n")


def check_follows(models: SmallModels, form: str, draft: str, samplings: list[dict[str, Any]], count: int) -> None:
    """``count`` draws for each entry of ``samplings``; equal entries are tested together."""
    options = FORMS["sparse"] | {"takes_argmax": True} if form == GREEDY_DRAFTS else FORMS[form]
    rig = ServiceRig(models.target, models.draft(draft), support_limit=SUPPORT_LIMIT, **options)
    outputs = rig.generate(interleaved(count, samplings), enough=LENGTH)
    drawn: dict[str, list[list[int]]] = {}
    for i, sampling in enumerate(samplings):
        drawn.setdefault(str(sampling or "plain"), []).extend(outputs[i :: len(samplings)])
    distributions = {str(sampling or "plain"): sampling for sampling in samplings}
    found = {name: p_value(models.target, distributions[name], outputs) for name, outputs in drawn.items()}
    report(form, draft, count, found)
    assert min(found.values()) > LEAST_P, found
    assert rig.num_draft_tokens > len(outputs)  # it did speculate,
    assert 0 < rig.num_accepted_tokens < rig.num_draft_tokens  # with both outcomes
    assert rig.num_pages_used() == 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_follow_the_joint_distribution(models: SmallModels, form: str, draft: str) -> None:
    check_follows(models, form, draft, [PLAIN, PLAIN, PLAIN, *TRUNCATIONS], 300)


@pytest.mark.parametrize("draft", ["good", "bad"])
def test_greedy_drafts_follow_the_joint_distribution(models: SmallModels, draft: str) -> None:
    check_follows(models, GREEDY_DRAFTS, draft, [PLAIN, PLAIN, {"top_k": 3}], 400)


@pytest.mark.parametrize("form", ["sparse", "coupled"])
def test_tokens_of_suffix_decoding_follow_it_too(models: SmallModels, form: str) -> None:
    check_follows(models, form, "suffix", [PLAIN, PLAIN, {"top_k": 3}], 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("samplings", [[PLAIN], TRUNCATIONS], ids=["plain", "truncated"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_thousand_draws_follow_the_joint_distribution(
    models: SmallModels, form: str, draft: str, samplings: list[dict[str, Any]]
) -> None:
    check_follows(models, form, draft, samplings, 100_000 // len(samplings))


async def draw_over_grpc(models: SmallModels, form: str, draft: str, count: int) -> list[list[int]]:
    kind = models.draft(draft)
    settings = {"support_limit": SUPPORT_LIMIT} if isinstance(kind, Path) else {}
    async with run_stack(
        models.target, kind, wire=True, draft_settings=settings, draft_timeout_ms=60_000, **FORMS[form]
    ) as stack:
        outputs: list[list[int]] = [[] for _ in range(count)]
        todo = iter(enumerate(requests(count, PLAIN)))

        async def work() -> None:
            for index, options in todo:
                result = await stack.generate(**options)
                outputs[index] = list(result.token_ids)

        await asyncio.gather(*(work() for _ in range(48)))
        assert stats_of(stack.coordinator).spec_stats.num_accepted_tokens > 0
        return outputs


@pytest.mark.parametrize(("form", "draft"), [("sparse", "bad"), ("coupled", "good")])
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_tokens_follow_the_joint_distribution_over_grpc(
    models: SmallModels, form: str, draft: str, count: int
) -> None:
    found = p_value(models.target, PLAIN, await draw_over_grpc(models, form, draft, count))
    report(form, draft, count, found)
    assert found > LEAST_P


# What must make the test fail.


def p_with(
    models: SmallModels,
    form: str,
    draft: str = "good",
    change: Callable[[Proposal], Proposal] | None = None,
    *,
    support_limit: int = SUPPORT_LIMIT,
    count: int,
) -> float:
    rig = ServiceRig(models.target, models.draft(draft), support_limit=support_limit, **FORMS[form])
    if change is not None:
        rig.change_draft_event = change
    outputs = rig.generate(requests(count, PLAIN), enough=LENGTH)
    found = p_value(models.target, PLAIN, outputs)
    report(form, draft, count, found)
    return found


def draw_with(monkeypatch: pytest.MonkeyPatch, stream: Stream) -> None:
    """The draft draws each token with one number of ``stream``, in the way the coordinator draws from a residual."""

    def coins_of(rows: Sequence[LogitRow], _: Stream, __: torch.device) -> list[float]:
        return [scalar.coin(row.open.seed, stream, row.base, row.length) for row in rows]

    def draw_among(log_weights: Tensor, token_ids: Tensor, coins: list[float], _: int) -> Tensor:
        sums = log_weights.double().exp().cumsum(-1)  # [N, S]
        slots = (sums <= torch.tensor(coins, dtype=torch.float64)[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
        return token_ids.gather(-1, slots).squeeze(-1)

    def draw(log_weights: Tensor, coins: list[float]) -> Tensor:
        token_ids = torch.arange(log_weights.shape[-1]).expand(log_weights.shape)
        return draw_among(log_weights, token_ids, coins, 0)

    monkeypatch.setattr(proposing, "stream_rows", coins_of)
    monkeypatch.setattr(proposing, "gumbel_argmax_among", draw_among)
    monkeypatch.setattr(proposing, "gumbel_argmax", draw)


@pytest.mark.parametrize(("shared", "count"), [(Stream.RESIDUAL, 2500), (Stream.ACCEPTANCE, 1000)], ids=str)
def test_a_stream_shared_with_the_proposal_is_caught(
    models: SmallModels, shared: Stream, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_with(monkeypatch, shared)
    assert p_with(models, "sparse", "bad", support_limit=VOCAB_SIZE, count=count) < CAUGHT_P


def test_a_stream_of_its_own_is_not(models: SmallModels, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_with(monkeypatch, Stream.PROPOSAL)
    assert p_with(models, "sparse", "bad", support_limit=VOCAB_SIZE, count=1000) > LEAST_P


def sharpened(event: Proposal) -> Proposal:
    """Says that the tokens were drawn from a sharper distribution than they were."""
    if isinstance(event.evidence, SparseEvidence):
        counts = event.evidence.counts
        probs = event.evidence.probs.astype(np.float64) ** 1.5
        sums = np.add.reduceat(probs, np.cumsum(counts) - counts).repeat(counts)
        return replace(event, evidence=replace(event.evidence, probs=(probs / sums).astype(np.float32)))
    return event


def test_a_distribution_that_was_not_drawn_from_is_caught(models: SmallModels) -> None:
    assert p_with(models, "sparse", change=sharpened, count=2000) < CAUGHT_P
