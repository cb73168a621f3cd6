"""Heads that are random, trained, and turned round: greedy output is transformers' own, coupled output the target's,
and rejection follows the target's joint distribution, however good or bad a head is.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import DraftSettings, load
from outrider.config.fields import DraftMethod
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, load_proposer
from tests.draft_service.head_rig import ALLOWED, LENGTH, TEMPERATURE, p_of_joint
from tests.draft_service.test_state_heads import among_allowed
from tests.end_to_end.test_greedy import NUM_ROWS, NUM_TOKEN_IDS, reference
from tests.model_executor.parity import random_ids
from tests.support.pair_heads import build_mimo
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model, load_reference
from tests.support.trained_heads import train_head, turn_round, write_head

METHODS = [method for method in DraftMethod if method.is_head]
KINDS = ["random", "trained", "reversed"]
NUM_DRAFTS, NUM_TOKENS, NUM_DRAWS = 3, 24, 800
ACCEPTANCE = ["rejection", "coupled", "typical"]
PROMPTS = [tuple(token % 256 for token in random_ids(length, length)) for length in (1, 9, 30)]
LEAST_ACCEPTED = 0.25
"""Least share of accepted tokens for a head that knows the text by heart."""

Serve = Callable[..., ServedProposer]


@pytest.fixture(scope="module")
def body() -> Path:
    """The target as transformers knows it: without its MTP layer."""
    return cached_tiny_model("qwen2", seed=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mimo(tmp_path_factory.mktemp("target") / "mimo")


@pytest.fixture(scope="module")
def expected(body: Path) -> list[list[int]]:
    """Output of transformers after the prompts."""
    padding = range(NUM_TOKEN_IDS, NUM_ROWS)
    return [reference(body, list(prompt), NUM_TOKENS, padding=padding) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(body: Path, expected: list[list[int]]) -> list[list[int]]:
    """Training text of the heads: those, and text of the few ids that the draws of these tests are from."""
    greedy = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
    return [*greedy, *_drawn(body, tuple(token % 256 for token in random_ids(6, 9)), count=8, num_tokens=6)]


def _drawn(body: Path, prompt: tuple[int, ...], *, count: int, num_tokens: int) -> list[list[int]]:
    model: Any = load_reference(body)
    generator, rows = torch.Generator().manual_seed(5), torch.tensor([prompt] * count)
    with torch.no_grad():
        for _ in range(num_tokens):
            probs = (model(rows).logits[:, -1, list(ALLOWED)] / TEMPERATURE).softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=generator)
            rows = torch.cat([rows, torch.tensor(ALLOWED)[drawn]], dim=1)
    return rows.tolist()


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, target: Path, body: Path, texts: list[list[int]]
) -> Callable[[DraftMethod, str], Path]:
    """The folder of a head of some kind, written once. A reversed head is a trained one, turned round."""
    root = tmp_path_factory.mktemp("heads")

    def folder_of(method: DraftMethod, kind: str) -> Path:
        folder = root / f"{method}-{kind}"
        if folder.exists():
            return folder
        if kind == "reversed":
            shutil.copytree(folder_of(method, "trained"), folder)
            turn_round(method, folder, body)
        else:
            write_head(method, folder, target)
        if kind == "trained":
            train_head(method, folder, body, texts)
        return folder

    return folder_of


def served(method: DraftMethod, folder: Path, target: Path, *more: str) -> ServedProposer:
    argv = ["--method", str(method), "--model", str(folder), "--device", "cpu", *more]
    if method is not DraftMethod.MTP:
        argv += ["--target-model", str(target)]
    return load_proposer(load(DraftSettings, [*argv, "--max-model-len", str(LENGTH)], {}), LoadHooks())


def rig_of(target: Path, draft: ServedProposer | None) -> ServiceRig:
    return ServiceRig(target, draft, max_model_len=LENGTH, num_speculative_tokens=NUM_DRAFTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_equals_transformers(
    method: DraftMethod, kind: str, folders: Any, target: Path, expected: list[list[int]]
) -> None:
    rig = rig_of(target, served(method, folders(method, kind), target))
    requests = [
        {"prompt_token_ids": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0,
         "acceptance_method": ACCEPTANCE[place]}
        for place, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    assert rig.generate(requests) == expected
    assert rig.num_draft_tokens > NUM_TOKENS
    share = rig.num_accepted_tokens / rig.num_draft_tokens
    assert share > LEAST_ACCEPTED if kind == "trained" else share < LEAST_ACCEPTED / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_coupled_output_is_the_targets_own(method: DraftMethod, kind: str, folders: Any, target: Path) -> None:
    requests = [
        {"prompt_token_ids": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": seed,
         "acceptance_method": "coupled", **({"allowed_token_ids": list(ALLOWED)} if seed % 2 else {})}
        for seed, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    rig = rig_of(target, served(method, folders(method, kind), target))
    assert rig.generate(requests) == rig_of(target, None).generate(requests)
    assert rig.num_draft_tokens > NUM_TOKENS


def _cells() -> Iterator[Any]:
    """Every head, rule and way to draft: for each head one is quick, all in turn among the heads; others are slow."""
    for place, method in enumerate(METHODS):
        for turn, kind in enumerate(("trained", "reversed"), place):
            quick = ("standard", "block")[turn % 2], "greedy" if turn % 4 == 3 else "probabilistic"
            for rule, sample in itertools.product(("standard", "block"), ("probabilistic", "greedy")):
                marks = [] if (rule, sample) == quick else [pytest.mark.slow]
                yield pytest.param(method, kind, rule, sample, marks=marks)


@pytest.mark.parametrize(("method", "kind", "rule", "sample"), list(_cells()))
def test_rejection_follows_the_joint_distribution(
    method: DraftMethod, kind: str, rule: str, sample: str, folders: Any, target: Path, body: Path, tmp_path: Path
) -> None:
    """Standard rule and block verification, drawn and likeliest drafts. The tests of each head have random ones."""
    folder = folders(method, kind)
    if method in {DraftMethod.MEDUSA, DraftMethod.MLP_SPECULATOR} and kind == "reversed":
        folder = tmp_path / "among"  # of all ids, the worst is never one that may be drawn
        among_allowed(str(method), folder, reverse=True)
    draft = served(method, folder, target, "--draft-sample-method", sample)
    assert p_of_joint(draft, target, body, num_draws=NUM_DRAWS, rejection_sample_method=rule) > 1e-4
