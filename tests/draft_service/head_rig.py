"""A draft head between a real target and a real session loop, each of its proposals compared with the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.config import DraftSettings, load
from outrider.ports import Proposal, SessionLost
from outrider.sampling.rows import LogitRow
from outrider_draft.proposers.head_executor import HeadExecutor
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, load_proposer
from tests.model_executor.parity import random_ids
from tests.support.service_rig import ServiceRig
from tests.support.statistics import cells, chi_square_p
from tests.support.tiny_models import load_reference

LENGTH = 128


ALLOWED, TEMPERATURE = (5, 77, 140, 200), 1.3


class Reference(Protocol):
    """A plain reading of a paper."""

    def draft(self, text: list[int], count: int) -> list[int]:
        """``count`` tokens after the text, the likeliest each."""
        ...


def served(method: str, head: Path, target: Path, *more: str) -> ServedProposer:
    argv = ["--method", method, "--model", str(head), "--target-model", str(target), "--device", "cpu"]
    sizes = ["--page-size", "4", "--num-pages", "800", "--max-model-len", str(LENGTH)]
    found = load_proposer(load(DraftSettings, [*argv, *sizes, *more], {}), LoadHooks())
    assert isinstance(found.executor, HeadExecutor)
    with torch.inference_mode():
        found.executor.runner.kv_cache.fill_(float("nan"))  # a stale read would show
    return found


def options(seed: int, length: int, **more: Any) -> dict[str, Any]:
    ids = tuple(token % 256 for token in random_ids(length, seed))
    return {"prompt_token_ids": ids, "max_tokens": 10, "ignore_eos": True, "temperature": 0.0, **more}


class StatesReference(Reference, Protocol):
    """One that gives the states too."""

    def draft_with_states(self, text: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and the input of the last product, [count, H]."""
        ...


def check_states(
    found: ServedProposer, reference: StatesReference, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions of each token of a head that drafts token by token are the reference's."""
    assert isinstance(found.executor, HeadExecutor)
    runner, seen = found.executor.runner, []
    logits, propose = runner.head.logits, runner.sampler.propose

    def watch(normed: torch.Tensor) -> torch.Tensor:
        seen.append(normed.clone())
        return logits(normed)

    def drawn(rows: torch.Tensor, requests: list[LogitRow]) -> Any:
        bases.append((requests[0].base, requests[0].length))
        return propose(rows, requests)

    bases: list[tuple[int, int]] = []
    monkeypatch.setattr(runner.head, "logits", watch)
    monkeypatch.setattr(runner.sampler, "propose", drawn)
    request = options(5, 40)
    output = ServiceRig(target, found, max_model_len=LENGTH, num_speculative_tokens=4).generate([request])[0]
    text = [*request["prompt_token_ids"], *output]
    assert len(seen) > 8
    for state, (base, length) in zip(seen, bases, strict=True):
        expected = reference.draft_with_states(text[:base], length - base + 1)[1][-1:]
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


REQUESTS = [options(1, 1), options(2, 9), options(3, 30), options(3, 30), options(4, 2), options(5, 60)]


def plain(target: Path, requests: list[dict[str, Any]]) -> list[list[int]]:
    return ServiceRig(target, None, max_model_len=LENGTH).generate(requests)


class Checked:
    """A rig each proposal of which is compared with the reference's."""

    def __init__(
        self, draft: ServedProposer, reference: Reference, target: Path, *, lose_every: int = 0, **more: Any
    ) -> None:
        self.draft, self.reference = draft, reference
        self.rig = ServiceRig(target, self.draft, max_model_len=LENGTH, num_speculative_tokens=4, **more)
        self.lose_every, self.num_checked, self.num_events = lose_every, 0, 0
        self.rig.change_draft_event = self.check

    def check(self, event: Any) -> Any:
        if not isinstance(event, Proposal):
            return event
        self.num_events += 1
        if self.lose_every and self.num_events % self.lose_every == 0:
            return SessionLost(event.session, event.generation, "of the test")
        if event.token_ids:
            text = list(self.rig.runs[event.session].loop.tokens.after(0))
            assert event.base_length == len(text)
            assert list(event.token_ids) == self.reference.draft(text, len(event.token_ids))
            self.num_checked += 1
        return event

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        found = self.rig.generate(requests)
        assert self.num_checked > len(requests)
        executor = self.draft.executor
        if isinstance(executor, HeadExecutor):
            executor.runner.sequences.check_integrity()
        return found


def p_of_joint(
    draft: ServedProposer, target: Path, body: Path | None = None, *, num_draws: int = 1200, **settings: Any
) -> float:
    """P-value of three tokens after a prompt, the first of them the prefill's, under the target's joint distribution
    over a few allowed ids; ``body`` is the target as transformers knows it, ``settings`` are the coordinator's.
    """
    prompt = tuple(token % 256 for token in random_ids(6, 9))
    sampling = {"temperature": TEMPERATURE, "allowed_token_ids": list(ALLOWED)}
    requests = [
        {"prompt_token_ids": prompt, "max_tokens": 4, "ignore_eos": True, "seed": seed, **sampling}
        for seed in range(num_draws)
    ]
    rig = ServiceRig(target, draft, max_model_len=LENGTH, num_speculative_tokens=3, **settings)
    outputs = rig.generate(requests, enough=3)
    assert 0 < rig.num_accepted_tokens < rig.num_draft_tokens
    blocks = [[ALLOWED.index(token) for token in output[:3]] for output in outputs]
    return chi_square_p(cells(blocks, len(ALLOWED)), _joint_law(body or target, prompt))


def _joint_law(target: Path, prompt: tuple[int, ...]) -> NDArray[np.float64]:
    """Joint distribution of three tokens, [len(ALLOWED) ** 3]."""
    model: Any = load_reference(target)
    distribution, texts = np.ones(1), [list(prompt)]
    with torch.no_grad():
        for _ in range(3):
            logits = model(torch.tensor(texts)).logits[:, -1, list(ALLOWED)].double() / TEMPERATURE
            distribution = (distribution[:, None] * logits.softmax(-1).numpy()).reshape(-1)
            texts = [[*text, token] for text in texts for token in ALLOWED]
    return distribution
