"""Hidden states that a target hands over: those of transformers, position by position, however the text came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import HiddenStateChunk, Score, Scores, SessionFailed
from outrider.prefix_hash import prefix_hash
from outrider.types import LAST_HIDDEN_STATE, HiddenStates
from outrider_target.service import build_core
from tests.model_executor.parity import random_ids
from tests.support.core_driver import Driver, open_session
from tests.support.tiny_models import cached_tiny_model, load_reference

TEXT = random_ids(60, seed=5)
LAYERS = (1, 0, 3, LAST_HIDDEN_STATE)
HIDDEN = 32


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny_model("llama", seed=1, num_hidden_layers=3)


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """[60, 4 * 32] of ``LAYERS``, by transformers: before the last norm where a layer is named."""
    model: Any = load_reference(folder)
    outputs: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        found = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    by_layer = {0: found[0], 1: found[1], 2: found[2], 3: last, LAST_HIDDEN_STATE: found[3]}
    return torch.cat([by_layer[layer][0] for layer in LAYERS], dim=-1)


def drive(folder: Path, *, max_batched_tokens: int = 16, prefix_caching: bool = True) -> Driver:
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=200, prefix_caching=prefix_caching)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    return Driver(build_core(runner, max_batched_tokens=max_batched_tokens))


def opened(session: int = 0, layers: tuple[int, ...] = LAYERS, **more: Any) -> Any:
    return open_session(session, prompt_length=40, max_length=80, num_token_ids=256, hidden_state_layers=layers, **more)


def score(
    generation: int, base: int, drafts: int = 0, *, kept: int = 0, start: int | None = 0, session: int = 0
) -> Score:
    hash_ = prefix_hash(TEXT[:kept])
    drafted = tuple(TEXT[base : base + drafts])
    return Score(session, generation, kept, hash_, tuple(TEXT[kept:base]), drafted, hidden_states_from=start)


def joined(events: list[Any]) -> HiddenStates:
    """All that the events brought, which must follow each other."""
    assert all(isinstance(event, HiddenStateChunk) for event in events[:-1])
    parts = [event.states for event in events[:-1]]
    if events[-1].hidden_states is not None:
        parts.append(events[-1].hidden_states)
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    first: HiddenStates = parts[0]
    return first.followed_by(parts[1:])


def check(states: HiddenStates, expected: torch.Tensor, start: int, end: int) -> None:
    assert (states.start, states.end, states.dtype) == (start, end, "float32")
    found = np.frombuffer(states.payload, np.float32).reshape(states.num_rows, states.width)
    np.testing.assert_allclose(found, expected[start:end].numpy(), atol=1e-4, rtol=1e-3)


def test_a_prompt_in_chunks_and_scored_positions(folder: Path, expected: torch.Tensor) -> None:
    driver = drive(folder)
    events = driver.run(opened(), score(2, 40))
    assert len(events) == 3
    check(joined(events), expected, 0, 40)
    (scores,) = driver.run(score(3, 41, 5, kept=40, start=40))
    check(scores.hidden_states, expected, 40, 46)
    (scores,) = driver.run(score(4, 44, 2, kept=43, start=43))
    check(scores.hidden_states, expected, 43, 46)


def test_only_what_is_wanted(folder: Path, expected: torch.Tensor) -> None:
    driver = drive(folder)
    check(joined(driver.run(opened(), score(2, 40, start=17))), expected, 17, 40)
    (scores,) = driver.run(score(3, 41, 2, kept=40, start=None))
    assert scores.hidden_states is None


def test_states_are_made_again_of_text_that_is_held(folder: Path, expected: torch.Tensor) -> None:
    driver = drive(folder)
    driver.run(opened(), score(2, 40, start=None))
    check(joined(driver.run(score(3, 44, 1, kept=9, start=9))), expected, 9, 45)


def test_what_is_cached_is_computed_where_states_are_wanted(folder: Path, expected: torch.Tensor) -> None:
    driver = drive(folder, max_batched_tokens=64)
    driver.run(opened(), score(2, 40, start=None))
    driver.run(opened(session=1), score(2, 40, start=22, session=1))
    assert [one.num_cached_tokens for one in driver.opened] == [0, 20]
    events = driver.run(opened(session=2), score(2, 40, start=3, session=2))
    assert driver.opened[-1].num_cached_tokens == 0
    check(joined(events), expected, 3, 40)
    driver.run(opened(session=3, layers=()), score(2, 40, start=None, session=3))
    assert driver.opened[-1].num_cached_tokens == 36


def test_sessions_of_different_layers_share_a_forward(folder: Path, expected: torch.Tensor) -> None:
    driver = drive(folder, max_batched_tokens=200)
    first, second, third = driver.run(
        opened(0, (3,)), opened(1, (LAST_HIDDEN_STATE, 1)), opened(2, ()),
        score(2, 40), score(2, 30, session=1, start=7), score(2, 20, session=2, start=None),
    )  # fmt: skip
    check(first.hidden_states, expected[:, 2 * HIDDEN : 3 * HIDDEN], 0, 40)
    check(second.hidden_states, torch.cat([expected[:, 3 * HIDDEN :], expected[:, :HIDDEN]], dim=-1), 7, 30)
    assert third.hidden_states is None


def test_scores_are_those_of_a_session_without_states(folder: Path) -> None:
    plain, handing = drive(folder), drive(folder)
    for generation, base, kept in ((2, 40, 0), (3, 41, 40)):
        (first,) = plain.run(opened(layers=()), score(generation, base, 3, kept=kept, start=None))[-1:]
        (second,) = handing.run(opened(), score(generation, base, 3, kept=kept, start=kept))[-1:]
        assert isinstance(first, Scores)
        assert first.form == second.form


@pytest.mark.parametrize(
    ("layers", "item", "field"),
    [
        (LAYERS, score(2, 20, start=20), "hidden_states_from"),
        ((), score(2, 20, start=0), "hidden_states_from"),
        ((4,), score(2, 20), "hidden_state_layers"),
        ((-2,), score(2, 20), "hidden_state_layers"),
    ],
)
def test_what_cannot_be_handed_over_fails_the_session(
    folder: Path, layers: tuple[int, ...], item: Score, field: str
) -> None:
    (failed,) = drive(folder).run(opened(layers=layers), item)
    assert isinstance(failed, SessionFailed)
    assert failed.field == field
