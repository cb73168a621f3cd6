"""Proposals from a model: what is drawn, what is said of it, and what the cache holds afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from outrider.model_executor.draft_loop import DraftingRules, DraftRow
from outrider.model_executor.draft_loop.results import Draws
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Open, Proposal, Refused, Release, SessionFailed
from outrider.randomness.philox_numpy import gumbel
from outrider.randomness.streams import Stream
from outrider.sampling.sampler import Sampler
from outrider.types import AcceptanceMethod, SamplingParams, SparseEvidence
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.tiny_models import build_tiny_model, load_reference

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
NUM_IDS = 257


def opened(session: int = 0, **changes: Any) -> Open:
    return open_session(session, **{"prompt_length": 8, "max_length": 60, "num_token_ids": NUM_IDS, **changes})


@pytest.fixture
def driver(proposer: ModelProposer) -> Driver:
    return Driver(build_model_core(proposer, max_batched_tokens=16))


def truth(reference: Any, tokens: list[int], *, temperature: float = 1.0) -> torch.Tensor:  # [T, V]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    logits[:, NUM_IDS:] = -torch.inf
    return torch.softmax(logits / temperature, dim=-1)


def greedy_continuation(reference: Any, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(truth(reference, tokens)[-1].argmax()))
    return tokens[-count:]


def held_tokens(driver: Driver, session: int = 0) -> list[int]:
    found = driver.core.sessions.get(driver.link_id, session)
    assert found is not None
    return list(found.sequence.token_ids)


def rows_of(evidence: Any) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    assert isinstance(evidence, SparseEvidence)
    cuts = np.cumsum(evidence.counts)[:-1]
    return list(zip(np.split(evidence.token_ids, cuts), np.split(evidence.probs, cuts), strict=True))


def test_greedy_proposals_are_the_models_own_continuation(driver: Driver, reference: Any) -> None:
    proposal = driver.one(opened(), extend_item(0, 2, PROMPT, 6))
    assert list(proposal.token_ids) == greedy_continuation(reference, PROMPT, 6)
    assert proposal.base_length == len(PROMPT)
    assert proposal.evidence is None


def test_the_bonus_token_hole(driver: Driver, reference: Any) -> None:
    """Cache without the last of K drafted tokens; when all were accepted the next item brings it and the bonus."""
    drafts = list(driver.one(opened(), extend_item(0, 2, PROMPT, 4)).token_ids)
    assert held_tokens(driver) == PROMPT + drafts[:3]
    tokens = [*PROMPT, *drafts, 5]
    item = extend_item(0, 3, tokens, 4, num_kept_tokens=len(PROMPT) + 3)
    assert len(item.token_ids) == 2
    proposal = driver.one(item)
    assert list(proposal.token_ids) == greedy_continuation(reference, tokens, 4)


def test_after_a_rejection_one_token_is_enough(driver: Driver, reference: Any) -> None:
    drafts = list(driver.one(opened(), extend_item(0, 2, PROMPT, 4)).token_ids)
    tokens = [*PROMPT, drafts[0], (drafts[1] + 1) % NUM_IDS]
    item = extend_item(0, 3, tokens, 4, num_kept_tokens=len(PROMPT) + 1)
    assert len(item.token_ids) == 1
    assert list(driver.one(item).token_ids) == greedy_continuation(reference, tokens, 4)


def test_an_extend_without_tokens_draws_from_what_is_held(driver: Driver, reference: Any) -> None:
    driver.one(opened(), extend_item(0, 2, PROMPT, 0))
    proposal = driver.one(extend_item(0, 3, PROMPT, 3, num_kept_tokens=len(PROMPT)))
    assert list(proposal.token_ids) == greedy_continuation(reference, PROMPT, 3)


def test_rows_with_more_text_than_a_loop_takes_in_draw_beside_the_others(
    runner: ModelRunner, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One loop for all: others would wait for their scores behind a second loop."""
    loops: list[list[int]] = []

    def draft(self: ModelRunner, rows: list[DraftRow]) -> list[Draws]:
        loops.append([len(row.token_ids) for row in rows])
        return [Draws(_drawn(self, row), None, None) for row in rows]

    monkeypatch.setattr(ModelRunner, "drafting", DraftingRules())
    monkeypatch.setattr(ModelRunner, "max_draft_rows", 8)
    monkeypatch.setattr(ModelRunner, "draft", draft)
    driver = Driver(build_model_core(ModelProposer(runner)))
    for session in range(2):
        driver.run(opened(session), extend_item(session, 2, PROMPT, 0))
    texts = [[*PROMPT, 5], [*PROMPT, 7, 9, 11]]
    items = (extend_item(each, 3, text, 4, num_kept_tokens=len(PROMPT)) for each, text in enumerate(texts))
    proposals = driver.run(*items)
    assert loops == [[1, 1]]
    assert [list(each.token_ids) for each in proposals] == [greedy_continuation(reference, text, 4) for text in texts]


def _drawn(runner: ModelRunner, row: DraftRow) -> tuple[int, ...]:
    tokens, found = list(row.token_ids), list[int]()
    for _ in range(row.num_drafts):
        logits = runner.forward([ForwardRow(row.sequence, tokens, 1)])
        tokens = [int(logits[0, :NUM_IDS].argmax())]
        found += tokens
    return tuple(found)


def test_evidence_is_the_models_distribution_cut_by_mass(
    runner: ModelRunner, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "sampler", Sampler(DraftingRules(support_mass=0.9)))
    driver = Driver(build_model_core(ModelProposer(runner)))
    proposal = driver.one(opened(sampling=SamplingParams(temperature=0.8)), extend_item(0, 2, PROMPT, 5))
    assert len(proposal.token_ids) == 5
    probs = truth(reference, PROMPT + list(proposal.token_ids), temperature=0.8)[len(PROMPT) - 1 :]
    for (ids, reported), token, row in zip(rows_of(proposal.evidence), proposal.token_ids, probs, strict=False):
        assert len(set(ids.tolist())) == len(ids)
        assert token in ids
        assert reported.sum() == pytest.approx(1, abs=1e-6)
        mass = float(row[ids].sum())
        assert mass >= 0.9 - 1e-5
        assert mass - float(row[ids].min()) < 0.9 + 1e-5
        np.testing.assert_allclose(reported, row[ids].numpy() / mass, rtol=1e-3, atol=1e-6)


def test_the_token_is_the_race_over_the_evidence(driver: Driver) -> None:
    """The noise is the proposal stream's, by seed, base and absolute position."""
    proposal = driver.one(opened(seed=77, sampling=SamplingParams()), extend_item(0, 2, PROMPT, 5))
    rows = zip(rows_of(proposal.evidence), proposal.token_ids, strict=True)
    for position, ((ids, probs), token) in enumerate(rows, start=len(PROMPT)):
        noise = gumbel(77, Stream.PROPOSAL, len(PROMPT), position, ids)
        assert ids[(np.log(probs) + noise).argmax()] == token


def test_tokens_are_drawn_from_the_evidence(runner: ModelRunner) -> None:
    """First and second tokens under many seeds follow the distributions that are reported of them."""
    driver = Driver(build_model_core(ModelProposer(runner), max_batched_tokens=4096))
    count = 2000
    allowed = (5, 6, 7, 8)
    sampling = SamplingParams(allowed_token_ids=allowed, temperature=3.0)
    first, second = np.zeros(4), np.zeros((4, 4))
    evidence: dict[int, Any] = {}
    for start in range(0, count, 50):
        sessions = range(start, start + 50)
        items = [extend_item(seed, 2, PROMPT[:2], 2) for seed in sessions]
        opens = [opened(seed, prompt_length=2, max_length=4, seed=seed, sampling=sampling) for seed in sessions]
        for proposal in driver.run(*opens, *items):
            one, two = (allowed.index(token) for token in proposal.token_ids)
            first[one] += 1
            second[one, two] += 1
            evidence[one] = rows_of(proposal.evidence)
        driver.send(*[Release(seed, 3) for seed in sessions])
    assert chisquare(first, probs_of(evidence[0][0], allowed) * count).pvalue > 1e-3
    for one in range(4):
        expected = probs_of(evidence[one][1], allowed) * first[one]
        assert chisquare(second[one], expected).pvalue > 1e-3


def probs_of(row: tuple[Any, Any], allowed: tuple[int, ...]) -> np.ndarray[Any, Any]:
    by_id = dict(zip(row[0].tolist(), row[1].tolist(), strict=True))
    probs = np.array([by_id.get(token, 0.0) for token in allowed])
    return np.asarray(probs / probs.sum())


@pytest.mark.parametrize("method", [AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL])
def test_other_rules_carry_no_evidence(driver: Driver, method: AcceptanceMethod) -> None:
    proposal = driver.one(opened(sampling=SamplingParams(), acceptance_method=method), extend_item(0, 2, PROMPT, 3))
    assert (len(proposal.token_ids), proposal.evidence) == (3, None)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.2, top_p=0.9)])
def test_the_same_extend_twice_gives_the_same_answer(driver: Driver, sampling: SamplingParams) -> None:
    item = extend_item(0, 2, PROMPT, 4)
    first = driver.one(opened(sampling=sampling), item)
    again = driver.one(item)
    assert again.token_ids == first.token_ids
    if first.evidence is not None:
        for (ids, probs), (same_ids, same_probs) in zip(rows_of(first.evidence), rows_of(again.evidence), strict=True):
            np.testing.assert_array_equal(ids, same_ids)
            np.testing.assert_allclose(probs, same_probs, atol=1e-6)


def test_a_new_extend_wins_in_the_middle_of_a_proposal(driver: Driver, reference: Any) -> None:
    driver.send(opened(), extend_item(0, 2, PROMPT, 8))
    for _ in range(3):
        assert driver.step() == []
    tokens = [*PROMPT, 9]
    events = driver.run(extend_item(0, 3, tokens, 2, num_kept_tokens=len(PROMPT)))
    assert [event.generation for event in events] == [3]
    assert list(events[0].token_ids) == greedy_continuation(reference, tokens, 2)


def test_k_rounds_are_k_forwards_for_all_sessions_and_rows_drop_out(driver: Driver, runner: ModelRunner) -> None:
    lengths = [0, 1, 2, 4, 4, 3]
    driver.send(*[opened(i, prompt_length=2) for i in range(6)])
    events = driver.run(*[extend_item(i, 2, [i + 1, i + 2], lengths[i]) for i in range(6)])
    assert runner.num_forwards == 4
    assert {event.session: len(event.token_ids) for event in events} == dict(enumerate(lengths))
    assert [report.batch_size for report in driver.reports] == [6, 4, 3, 2]


def test_a_session_that_comes_late_joins_the_next_forward(driver: Driver, runner: ModelRunner) -> None:
    driver.send(opened(0), opened(1), extend_item(0, 2, [1, 2], 4))
    driver.step()
    events = driver.run(extend_item(1, 2, [3, 4], 4))
    assert len(events) == 2
    assert runner.num_forwards == 5


def test_a_long_prompt_does_not_stall_the_others(driver: Driver, runner: ModelRunner) -> None:
    driver.send(opened(0, max_length=200, prompt_length=190), opened(1, max_length=200))
    driver.send(extend_item(0, 2, list(range(190)), 4))
    driver.step()
    before = runner.num_forwards
    driver.send(extend_item(1, 2, [1, 2, 3], 3))
    events: list[Any] = []
    while not events:
        events += driver.step()
    assert [event.session for event in events] == [1]
    assert runner.num_forwards - before == 3


def test_proposals_stay_within_session_and_model(folder: Path, reference: Any) -> None:
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64, max_model_len=12)
    driver = Driver(build_model_core(ModelProposer(runner)))
    driver.send(opened(0, max_length=10), opened(1, max_length=60))
    assert len(driver.one(extend_item(0, 2, PROMPT, 8)).token_ids) == 2
    proposal = driver.one(extend_item(1, 2, PROMPT, 8))
    assert list(proposal.token_ids) == greedy_continuation(reference, PROMPT, 5)  # the last is not fed
    longer = [*PROMPT, *proposal.token_ids]
    assert driver.one(extend_item(1, 3, longer, 8, num_kept_tokens=12)) == Proposal(1, 3, 13, ())
    assert driver.one(extend_item(1, 4, [*longer, 1], 8, num_kept_tokens=13)) == Proposal(1, 4, 14, ())
    assert driver.one(opened(2, max_length=60), extend_item(2, 2, list(range(20)), 4)) == Proposal(2, 2, 20, ())


def test_no_room_is_refused_and_pages_come_back(driver: Driver, runner: ModelRunner) -> None:
    fits = runner.sequences.pool.num_pages * runner.page_size // 256
    for number in range(fits):
        driver.run(opened(number, max_length=256), extend_item(number, 2, [number, *[1] * 255], 0))
    refused = driver.one(opened(fits), extend_item(fits, 2, PROMPT, 4))
    assert isinstance(refused, Refused)
    driver.send(opened(0, generation=3), extend_item(0, 4, PROMPT, 8))
    driver.step()
    driver.core.drop_link(0)
    assert not driver.core.has_work
    runner.sequences.check_integrity()
    assert runner.sequences.pool.num_free == runner.sequences.pool.num_pages


@pytest.fixture
def poisoned(tmp_path: Path) -> Driver:
    """A draft whose logits are no numbers after token 66."""
    folder = build_tiny_model(tmp_path / "model", seed=2)
    model: Any = load_reference(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[66] = torch.nan
    model.save_pretrained(folder)
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64)
    return Driver(build_model_core(ModelProposer(runner)))


def test_logits_that_are_no_numbers_end_the_proposal(poisoned: Driver) -> None:
    driven = SamplingParams(temperature=0.0, logit_bias=((66, 100.0),))
    events = poisoned.run(
        opened(0, sampling=driven), opened(1), extend_item(0, 2, PROMPT, 4), extend_item(1, 2, PROMPT, 4)
    )
    by_session = {event.session: event for event in events}
    assert by_session[0] == Proposal(0, 2, 8, (66,))
    assert len(by_session[1].token_ids) == 4
    tokens = [*PROMPT, 3]
    again = poisoned.one(extend_item(0, 3, tokens, 1, num_kept_tokens=len(PROMPT)))
    assert again == Proposal(0, 3, 9, (66,))


def test_a_session_whose_text_gives_no_numbers_fails_alone(poisoned: Driver) -> None:
    events = poisoned.run(opened(0), opened(1), extend_item(0, 2, [66, 3], 4), extend_item(1, 2, PROMPT, 4))
    by_session = {event.session: event for event in events}
    assert isinstance(by_session[0], SessionFailed)
    assert by_session[0].code == "NonFiniteLogitsError"
    assert len(by_session[1].token_ids) == 4


def test_a_bad_item_fails_its_session_alone(driver: Driver) -> None:
    events = driver.run(opened(0), opened(1), extend_item(0, 2, [272], 4), extend_item(1, 2, PROMPT, 1))
    assert isinstance(events[0], SessionFailed)
    assert (events[0].session, events[0].field) == (0, "token_ids")
    assert isinstance(events[1], Proposal)


def test_neighbours_change_nothing(proposer: ModelProposer) -> None:
    def ask(neighbours: int) -> Proposal:
        driver = Driver(build_model_core(proposer))
        driver.send(opened(0, sampling=SamplingParams(temperature=0.9)))
        driver.send(*[replace(opened(i), seed=i) for i in range(1, neighbours)])
        events = driver.run(
            extend_item(0, 2, PROMPT, 4), *[extend_item(i, 2, PROMPT[: i % 8 + 1], i % 5) for i in range(1, neighbours)]
        )
        driver.core.drop_link(0)
        (proposal,) = [event for event in events if event.session == 0]
        assert isinstance(proposal, Proposal)
        return proposal

    alone, beside = ask(1), ask(12)
    assert alone.token_ids == beside.token_ids
    for (ids, probs), (same_ids, same_probs) in zip(rows_of(alone.evidence), rows_of(beside.evidence), strict=True):
        np.testing.assert_array_equal(np.sort(ids), np.sort(same_ids))
        np.testing.assert_allclose(np.sort(probs), np.sort(same_probs), atol=2e-6)


def test_reports_cover_all_rounds(driver: Driver) -> None:
    driver.run(opened(), extend_item(0, 2, PROMPT, 4))
    (report,) = driver.reports
    assert report.forward_ns > 0
    assert report.queue_ns + report.forward_ns + report.sample_ns <= report.total_ns
    assert report.num_pages_free == driver.core.num_pages_free < 256
