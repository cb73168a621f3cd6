"""Answers of a target: form, values, and equality of K+1 positions at once with K+1 positions one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.item_batch import command_batch
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Score, Scores
from outrider.types import (
    AcceptanceMethod,
    Grammar,
    GrammarKind,
    SamplingParams,
    SparseScores,
    Support,
    TokenScores,
    TypicalScores,
)
from outrider_target.service import build_core
from tests.structured_output.vocabularies import letters
from tests.support.core_driver import Driver, open_session, score_item
from tests.support.tiny_models import cached_tiny_model, load_reference

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
DRAFTS = [17, 250, 3, 99]
NUM_IDS = 257
VOCAB = 272


def opened(session: int = 0, **changes: Any) -> Any:
    return open_session(
        session, **{"prompt_length": len(PROMPT), "max_length": 60, "num_token_ids": NUM_IDS, **changes}
    )


def full_support(num_rows: int) -> Support:
    ids = np.tile(np.arange(NUM_IDS, dtype=np.int32), num_rows)
    return Support(np.full(num_rows, NUM_IDS, dtype=np.int32), ids)


def reference_probs(reference: Any, tokens: list[int], *, temperature: float = 1.0) -> torch.Tensor:  # [T, V]
    """Every position's distribution, padding rows left out."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    logits[:, NUM_IDS:] = -torch.inf
    return torch.softmax(logits / temperature, dim=-1)


def greedy_steps(driver: Driver, prompt: list[int], count: int, *, length: int, drafted: list[int]) -> list[int]:
    """Greedy decoding with drafts that are right now and then, as a coordinator would do it."""
    tokens, generation, held = list(prompt), 2, 0
    while len(tokens) < len(prompt) + count:
        start = len(tokens) - len(prompt)
        drafts = drafted[start : start + length] if held else []
        answer = driver.one(score_item(0, generation, tokens, drafts, num_kept_tokens=held))
        assert isinstance(answer, Scores)
        assert isinstance(answer.form, TokenScores)
        assert answer.base_length == len(tokens)
        wanted = answer.form.token_ids
        assert len(wanted) == len(drafts) + 1
        accepted = next((i for i, draft in enumerate(drafts) if draft != wanted[i]), len(drafts))
        held = len(tokens) + accepted
        tokens += wanted[: accepted + 1]
        generation += 1
    return tokens[len(prompt) :][:count]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("length", [0, 4])
def test_greedy_equals_generate(architecture: str, length: int) -> None:
    folder = cached_tiny_model(architecture, seed=5)
    model: Any = load_reference(folder)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        truth = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    truth = [int(token) for token in truth]
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64)
    driver = Driver(build_core(runner, max_batched_tokens=5))
    driver.send(opened(num_token_ids=VOCAB))
    drafted = [token if index % 3 else (token + 1) % VOCAB for index, token in enumerate(truth)]
    assert greedy_steps(driver, PROMPT, 24, length=length, drafted=drafted) == truth


def test_sparse_scores_are_the_targets_distribution(runner: ModelRunner, reference: Any) -> None:
    counts = np.array([3, 0, NUM_IDS, 1], dtype=np.int32)
    ids = np.concatenate([[17, 5, 6], np.arange(NUM_IDS), [99]]).astype(np.int32)
    sampling = SamplingParams(temperature=0.7)
    answer = Driver(build_core(runner)).one(
        opened(sampling=sampling), score_item(0, 2, PROMPT, DRAFTS, support=Support(counts, ids))
    )
    probs = reference_probs(reference, PROMPT + DRAFTS, temperature=0.7)[len(PROMPT) - 1 :].numpy()
    rows = [probs[0, [17, 5, 6]], probs[2, :NUM_IDS], probs[3, [99]]]
    form = answer.form
    assert isinstance(form, SparseScores)
    np.testing.assert_allclose(form.support_probs, np.concatenate(rows), atol=1e-5)
    outside = [1 - rows[0].sum(), 1, 0, 1 - rows[2].sum(), 1]
    np.testing.assert_allclose(form.outside_mass, outside, atol=1e-5)
    assert form.outside_token_ids[2] == -1
    assert form.outside_token_ids[0] not in (17, 5, 6, -1)


@pytest.mark.parametrize("method", list(AcceptanceMethod))
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.1, top_k=20, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.7),
    ],
)
def test_positions_at_once_equal_positions_one_by_one(
    runner: ModelRunner, method: AcceptanceMethod, sampling: SamplingParams
) -> None:
    """The draft prefix counts as output, so penalties must see it just as if it were committed."""
    more: dict[str, Any] = {"acceptance_method": method, "sampling": sampling, "num_logprobs": 2}
    driver = Driver(build_core(runner))
    answer = driver.one(opened(**more), score_item(0, 2, PROMPT, DRAFTS, support=full_support(len(DRAFTS))))
    for position in range(len(DRAFTS)):
        tokens, drafts = PROMPT + DRAFTS[:position], DRAFTS[position : position + 1]
        single = driver.one(
            opened(session=1, generation=2 * position + 1, **more),
            score_item(1, 2 * position + 2, tokens, drafts, support=full_support(1)),
        )
        check_same_position(answer.form, single.form, position)
        if answer.logprobs:
            check_same_logprobs(answer.logprobs[position], single.logprobs[0])


def check_same_position(together: Any, alone: Any, position: int) -> None:
    """``alone`` was scored with one draft token: its position 0 is ``position`` of ``together``."""
    if isinstance(together, TokenScores):
        assert together.token_ids[position] == alone.token_ids[0]
    elif isinstance(together, SparseScores):
        row = slice(position * NUM_IDS, (position + 1) * NUM_IDS)
        np.testing.assert_allclose(together.support_probs[row], alone.support_probs, atol=1e-5)
    else:
        assert isinstance(together, TypicalScores)
        np.testing.assert_allclose(together.draft_token_probs[position], alone.draft_token_probs[0], atol=1e-5)
        np.testing.assert_allclose(together.entropies[position], alone.entropies[0], atol=1e-4)
        assert together.argmax_token_ids[position] == alone.argmax_token_ids[0]


def check_same_logprobs(together: Any, alone: Any) -> None:
    assert together.top_token_ids.tolist() == alone.top_token_ids.tolist()
    expected = dict(zip(alone.token_ids.tolist(), alone.logprobs.tolist(), strict=True))
    for token_id, logprob in zip(together.token_ids.tolist(), together.logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected[token_id], abs=1e-4)


def test_the_same_item_twice_gives_the_same_answer(runner: ModelRunner) -> None:
    driver = Driver(build_core(runner))
    more: dict[str, Any] = {"sampling": SamplingParams(), "acceptance_method": AcceptanceMethod.COUPLED}
    driver.run(opened(**more), score_item(0, 2, PROMPT))
    item = score_item(0, 3, [*PROMPT, 42], DRAFTS, num_kept_tokens=len(PROMPT))
    assert driver.one(item) == driver.one(item)


def test_results_do_not_depend_on_the_neighbours(runner: ModelRunner) -> None:
    def ask(neighbours: int) -> tuple[Any, ...]:
        driver = Driver(build_core(runner))
        driver.send(
            opened(sampling=SamplingParams()), *[opened(session=i, max_length=99) for i in range(1, neighbours)]
        )
        items: list[Score] = [
            score_item(i, 2, [(i * 31 + j) % NUM_IDS for j in range(7 + 5 * i)]) for i in range(1, neighbours)
        ]
        events = driver.run(*items, score_item(0, 2, PROMPT, DRAFTS, support=full_support(len(DRAFTS))))
        driver.core.drop_link(0)
        return tuple(event for event in events if event.session == 0)

    (alone,), (beside,) = ask(1), ask(9)
    np.testing.assert_allclose(alone.form.support_probs, beside.form.support_probs, atol=2e-6)
    np.testing.assert_array_equal(alone.form.outside_token_ids, beside.form.outside_token_ids)


def test_logprobs_only_when_asked(runner: ModelRunner) -> None:
    driver = Driver(build_core(runner))
    answer = driver.one(opened(), score_item(0, 2, PROMPT, DRAFTS))
    assert (answer.logprobs, answer.prompt_logprobs) == ((), ())


@pytest.mark.parametrize("budget", [4, 512])
def test_prompt_logprobs_across_chunks(runner: ModelRunner, reference: Any, budget: int) -> None:
    prompt = [(i * 37) % NUM_IDS for i in range(30)]
    driver = Driver(build_core(runner, max_batched_tokens=budget))
    first = opened(prompt_length=30, num_prompt_logprobs=2)
    beside = opened(session=1, prompt_length=20)
    events = driver.run(first, beside, score_item(0, 2, prompt, [5, 6]), score_item(1, 2, prompt[:20], [7]))
    answer = next(event for event in events if event.session == 0)
    with torch.inference_mode():
        truth = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], dim=-1)
    assert len(answer.prompt_logprobs) == 29
    for position, entry in enumerate(answer.prompt_logprobs, start=1):
        assert entry.token_ids.tolist() == [prompt[position]]
        assert entry.logprobs[0] == pytest.approx(float(truth[position - 1, prompt[position]]), abs=1e-4)
        assert entry.top_token_ids.tolist() == truth[position - 1, :NUM_IDS].topk(2).indices.tolist()
    assert next(event for event in events if event.session == 1).prompt_logprobs == ()
    unasked = driver.one(opened(2, prompt_length=30), score_item(2, 2, prompt, [5, 6]))
    assert answer.form == unasked.form


def test_prompt_logprobs_of_what_an_item_brings(runner: ModelRunner) -> None:
    prompt = [(i * 37) % NUM_IDS for i in range(20)]
    whole = Driver(build_core(runner)).one(opened(prompt_length=20, num_prompt_logprobs=0), score_item(0, 2, prompt))
    driver = Driver(build_core(runner), link_id=1)
    driver.run(opened(prompt_length=20, num_prompt_logprobs=0), score_item(0, 2, prompt[:12]))
    rest = driver.one(score_item(0, 3, [*prompt, 9], num_kept_tokens=12))
    assert [entry.token_ids[0] for entry in rest.prompt_logprobs] == prompt[12:]
    for ours, theirs in zip(rest.prompt_logprobs, whole.prompt_logprobs[11:], strict=True):
        assert ours.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=1e-4)


def test_padded_ids_are_never_emitted(folder: Path) -> None:
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64)
    driver = Driver(build_core(runner))
    nothing = Support(np.zeros(2, np.int32), np.zeros(0, np.int32))
    for generation, method in enumerate(AcceptanceMethod, start=1):
        more: dict[str, Any] = {
            "acceptance_method": method,
            "sampling": SamplingParams(temperature=50.0),
            "num_token_ids": 3,
        }
        item = score_item(0, 2 * generation + 1, PROMPT, [1, 2], support=nothing)
        answer = driver.one(opened(generation=2 * generation, **more), item)
        assert max(emitted_ids(answer.form)) < 3


def emitted_ids(form: Any) -> list[int]:
    if isinstance(form, TokenScores):
        return list(form.token_ids)
    if isinstance(form, SparseScores):
        return [int(token) for token in form.outside_token_ids]
    return [*form.argmax_token_ids.tolist(), form.bonus_token_id]


def test_grammars_follow_the_drafts_of_their_own_session(runner: ModelRunner) -> None:
    runner.sampler.grammars = letters("abcdefghi")
    a, b, c, d, e, f, g, h, i = range(9)
    driver, grammar = Driver(build_core(runner)), Grammar(GrammarKind.REGEX, "aa(b(c|d)|e(f(g|h)|i))")
    for session in range(2):
        driver.send(opened(session, sampling=SamplingParams(temperature=0.0, grammar=grammar)))
        assert driver.one(score_item(session, 2, PROMPT)).form.token_ids == (a,)

    def score(generation: int, tokens: list[int], *drafts: list[int]) -> tuple[bool, list[Any]]:
        """True if both are served as a batch, and their tokens."""
        kept = len(tokens) - 1
        items = [score_item(n, generation, tokens, drafts[n], num_kept_tokens=kept) for n in range(2)]
        driver.core.handle(0, (command_batch(items),))
        is_batch = driver.core.decode.pending is not None
        return is_batch, [event.form.token_ids for event in driver.run()]

    score(3, [*PROMPT, a], [a], [a])
    is_batch, (first, second) = score(4, [*PROMPT, a, a], [b], [e, f])
    assert is_batch
    assert first[0] in (b, e) and first[1] in (c, d)
    assert second[0] in (b, e) and second[1] in (f, i) and second[2] in (g, h)
