"""Drafts with a window, which compute the end of a long text and are asked about all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import AttentionWindow
from outrider.ports import Open, SessionLost
from outrider.prefix_hash import prefix_hash
from outrider.randomness.philox_numpy import gumbel
from outrider.randomness.streams import Stream
from outrider.types import SamplingParams
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.proposers.tail_sequences import TailSequence, TailSequences, longest_tail, tail_stride
from outrider_draft.service import build_model_core
from tests.draft_service.test_model_proposer import NUM_IDS, rows_of
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.tiny_models import cached_tiny_model

WINDOW = 24
TEXT = [index * 7 % NUM_IDS for index in range(600)]
LEFT_OUT = 512


def opened(session: int = 0, **changes: Any) -> Open:
    return open_session(session, **{"prompt_length": 600, "max_length": 700, "num_token_ids": NUM_IDS, **changes})


@pytest.fixture(scope="module")
def long_folder() -> Path:
    return cached_tiny_model("llama", seed=2, max_position_embeddings=1024)


@pytest.fixture
def windowed(long_folder: Path) -> Iterator[ModelRunner]:
    loaded = ModelRunner.load(
        long_folder, dtype="float32", page_size=4, num_pages=256, attention_window=AttentionWindow(WINDOW, 2)
    )
    with torch.inference_mode():
        loaded.kv_cache.fill_(float("nan"))  # a read of what was left out would show
    yield loaded
    loaded.sequences.check_integrity()


@pytest.fixture
def driver(windowed: ModelRunner) -> Driver:
    return Driver(build_model_core(ModelProposer(windowed), max_batched_tokens=64))


def held(driver: Driver, session: int = 0) -> TailSequence:
    found = driver.core.sessions.get(driver.link_id, session)
    assert found is not None and isinstance(found.sequence, TailSequence)
    return found.sequence


def test_proposals_are_those_for_the_end_of_the_text(driver: Driver) -> None:
    drafts = driver.one(opened(), extend_item(0, 2, TEXT, 5)).token_ids
    assert len(drafts) == 5
    sequence = held(driver)
    assert (sequence.kv_offset, sequence.length) == (LEFT_OUT, 604)
    assert list(sequence.token_ids) == [*TEXT, *drafts[:4]]
    assert driver.core.num_pages_free == 256 - 23  # for 92 tokens, until a window of them is held
    end = TEXT[LEFT_OUT:]
    alone = driver.one(opened(1, prompt_length=len(end)), extend_item(1, 2, end, 5))
    assert (alone.token_ids, held(driver, 1).kv_offset) == (drafts, 0)


def test_it_goes_on_from_accepted_and_from_rejected_tokens(driver: Driver) -> None:
    drafts = list(driver.one(opened(), extend_item(0, 2, TEXT, 4)).token_ids)
    texts = [[*TEXT, *drafts, 5], [*TEXT, *drafts, 5, 9]]
    first = driver.one(extend_item(0, 3, texts[0], 4, num_kept_tokens=603)).token_ids
    second = driver.one(extend_item(0, 4, texts[1], 4, num_kept_tokens=605)).token_ids
    for session, (text, found) in enumerate(zip(texts, (first, second), strict=True), 1):
        end = text[LEFT_OUT:]
        item = extend_item(session, 2, end, 4)
        assert driver.one(opened(session, prompt_length=len(end)), item).token_ids == found


def test_noise_is_that_of_the_place_in_the_whole_text(driver: Driver) -> None:
    sampled = opened(seed=77, sampling=SamplingParams(temperature=1.3))
    proposal = driver.one(sampled, extend_item(0, 2, TEXT, 5))
    rows = zip(rows_of(proposal.evidence), proposal.token_ids, strict=True)
    for position, ((ids, probs), token) in enumerate(rows, start=len(TEXT)):
        noise = gumbel(77, Stream.PROPOSAL, len(TEXT), position, ids)
        assert ids[(np.log(probs) + noise).argmax()] == token


def test_what_was_left_out_is_checked_and_not_gone_back_to(driver: Driver) -> None:
    for generation, (text, kept) in enumerate([([1, *TEXT[1:]], 600), (TEXT, 400), (TEXT, LEFT_OUT)]):
        driver.one(opened(generation), extend_item(generation, 2, TEXT, 0))
        lost = driver.one(extend_item(generation, 3, [*text[:kept], 3], 4, num_kept_tokens=kept))
        assert isinstance(lost, SessionLost), generation


@pytest.mark.parametrize("kept", [LEFT_OUT, 624])
def test_a_token_to_be_computed_again_that_is_not_held_costs_the_session_alone(driver: Driver, kept: int) -> None:
    """Token that was left out, or whose context was given back: 24 tokens of 600 are the first that are held of 690."""
    longer = [*TEXT, *range(90)]
    driver.send(opened(), extend_item(0, 2, TEXT, 0))
    if kept > LEFT_OUT:
        while driver.core.has_work:
            driver.step()
        driver.run(extend_item(0, 3, longer, 0, num_kept_tokens=600))
    (lost,) = driver.run(extend_item(0, 4, longer[:kept], 4, num_kept_tokens=kept))
    assert isinstance(lost, SessionLost)
    assert len(driver.one(opened(1), extend_item(1, 2, TEXT, 4)).token_ids) == 4


def test_a_text_that_is_brought_anew_begins_anew(driver: Driver) -> None:
    driver.one(opened(), extend_item(0, 2, TEXT, 4))
    short = driver.one(extend_item(0, 3, TEXT[:30], 4))
    assert held(driver).kv_offset == 0
    assert short.token_ids == driver.one(opened(1), extend_item(1, 2, TEXT[:30], 4)).token_ids
    long = driver.one(extend_item(0, 4, TEXT[:300], 4))
    assert (held(driver).kv_offset, len(long.token_ids)) == (256, 4)


def test_the_end_of_a_text_is_found_in_the_prefix_cache(driver: Driver) -> None:
    first = driver.one(opened(), extend_item(0, 2, TEXT, 4)).token_ids
    assert driver.opened[-1].num_cached_tokens == LEFT_OUT
    assert driver.one(opened(1), extend_item(1, 2, [*TEXT[:580], 1], 4)).token_ids
    assert driver.opened[-1].num_cached_tokens == 580
    assert driver.one(opened(2), extend_item(2, 2, TEXT, 4)).token_ids == first
    assert driver.opened[-1].num_cached_tokens == 596


@pytest.mark.parametrize("window", [1, 24, 512, 1024, 5000])
def test_a_tail_is_a_window_at_least_and_at_most_one_and_a_half_of_large_ones(
    windowed: ModelRunner, window: int
) -> None:
    sequences = TailSequences(windowed.sequences, window)
    assert tail_stride(window) % 256 == 0
    for length in (1, window, window + 255, window + 256, 3 * window + 1000):
        kv_offset = sequences.kv_offset_of(length)
        assert min(window, length) <= length - kv_offset <= longest_tail(window)
    assert longest_tail(window) <= max(window + 256, 1.5 * window)


def test_hashes_are_those_of_the_whole_text(windowed: ModelRunner) -> None:
    sequences = TailSequences(windowed.sequences, WINDOW)
    sequence = sequences.open(700, "", b"key")
    assert sequences.adopt_prefix(sequence, TEXT) == LEFT_OUT
    windowed.sequences.extend(sequence.kv, TEXT[LEFT_OUT:])
    for length in (0, 1, 255, 256, 511, 512, 513, 599, 600):
        assert sequences.prefix_hash(sequence, length) == prefix_hash(TEXT[:length], b"key")
    chain, tails = sequences.hash_tails(sequence, 590)
    assert [(chain, rest) for rest in tails] == [prefix_hash(TEXT[:length], b"key") for length in range(590, 601)]
    sequences.truncate(sequence, 0)
    assert (sequence.kv_offset, sequence.length) == (0, 0)
    sequences.release(sequence)
