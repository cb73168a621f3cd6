"""A target's sessions: generations, losses, refusals, bad items, and pages that always come back."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Refused, Release, Score, Scores, SessionFailed, SessionLost
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.sampling.session import SessionSampling
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.types import SamplingParams, Support
from outrider_target.service import build_core
from tests.support.core_driver import Driver, open_session, score_item
from tests.support.tiny_models import build_tiny_model, load_reference

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
DRAFTS = [7, 8]
NUM_IDS = 257


def opened(session: int = 0, **changes: Any) -> Any:
    return open_session(session, **{"prompt_length": 8, "max_length": 40, "num_token_ids": NUM_IDS, **changes})


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    return Driver(build_core(runner, max_batched_tokens=16))


def all_pages_free(runner: ModelRunner) -> bool:
    runner.sequences.check_integrity()
    return runner.sequences.pool.num_free == runner.sequences.pool.num_pages


def test_too_little_and_another_text_are_lost(driver: Driver) -> None:
    driver.run(opened(), score_item(0, 2, PROMPT))
    lost = driver.one(score_item(0, 3, [*PROMPT, 1, 2], num_kept_tokens=9))
    assert isinstance(lost, SessionLost)
    assert (lost.session, lost.generation) == (0, 3)
    wrong = driver.one(score_item(0, 4, [*PROMPT[:-1], 0, 1], num_kept_tokens=8))
    assert isinstance(wrong, SessionLost)
    again = driver.run(opened(generation=5), score_item(0, 6, PROMPT))
    assert isinstance(again[0], Scores)


def test_a_session_that_was_never_opened_is_lost(driver: Driver) -> None:
    assert isinstance(driver.one(score_item(5, 2, PROMPT)), SessionLost)


def test_the_answer_is_to_the_newest_item_alone(driver: Driver) -> None:
    driver.send(opened(), score_item(0, 2, PROMPT * 4))
    driver.step()
    events = driver.run(score_item(0, 5, PROMPT), score_item(0, 4, PROMPT[:3]))
    assert [(event.generation, event.base_length) for event in events] == [(5, 8)]


def sampling_states() -> list[SessionSampling]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is SessionSampling]


def test_what_is_derived_from_a_session_is_made_once_and_ends_with_it(driver: Driver) -> None:
    before = sampling_states()  # whatever others have left stays as long as this does
    rules = SamplingParams(temperature=0.8, logit_bias=((3, 1.0),), allowed_token_ids=tuple(range(250)))
    for number in range(3):
        driver.run(opened(number, sampling=rules), score_item(number, 2, PROMPT))
        driver.one(score_item(number, 3, [*PROMPT, 7], num_kept_tokens=8))
        assert len(sampling_states()) == len(before) + number + 1
    driver.run(Release(1, 4))
    assert len(sampling_states()) == len(before) + 2
    driver.core.drop_link(driver.link_id)
    assert len(sampling_states()) == len(before)


def test_release_stops_a_prefill_half_done(driver: Driver, runner: ModelRunner) -> None:
    driver.send(opened(), score_item(0, 2, PROMPT * 5))
    assert driver.step() == []
    driver.send(Release(0, 3))
    assert not driver.core.has_work
    assert all_pages_free(runner)
    assert driver.run(score_item(0, 4, PROMPT)) == []


def test_opening_anew_stops_a_prefill_half_done(driver: Driver, runner: ModelRunner) -> None:
    driver.send(opened(), score_item(0, 2, PROMPT * 5))
    driver.step()
    events = driver.run(opened(generation=3), score_item(0, 4, PROMPT))
    assert [event.generation for event in events] == [4]


def test_opening_anew_alone_leaves_nothing_to_do(driver: Driver, runner: ModelRunner) -> None:
    driver.send(opened(), score_item(0, 2, PROMPT * 5))
    driver.step()
    driver.send(opened(generation=3))
    assert not driver.core.has_work


@pytest.mark.parametrize(
    "item",
    [score_item(0, 3, [*PROMPT, 272], num_kept_tokens=0), score_item(0, 3, [*PROMPT[::-1], 1], num_kept_tokens=8)],
)
def test_an_item_that_cannot_be_served_stops_the_one_before_it(driver: Driver, item: Score) -> None:
    driver.send(opened(), score_item(0, 2, PROMPT * 5))
    driver.step()
    events = driver.run(item)
    assert [type(event) for event in events] in ([SessionFailed], [SessionLost])
    assert events[0].generation == 3


def test_a_service_that_ends_refuses_new_sessions_and_goes_on_with_the_others(driver: Driver) -> None:
    driver.send(opened())
    driver.core.refuse_sessions("ending")
    refused, scores = driver.run(opened(1), score_item(0, 2, PROMPT), score_item(1, 2, PROMPT))
    assert isinstance(refused, Refused)
    assert isinstance(scores, Scores)
    assert driver.core.num_sessions == 1
    assert isinstance(driver.one(opened(generation=3), score_item(0, 4, PROMPT)), Scores)


def test_link_loss_releases_its_sessions_alone(runner: ModelRunner) -> None:
    core = build_core(runner, max_batched_tokens=16)
    leaving, staying = Driver(core, 1), Driver(core, 2)
    leaving.send(opened(), score_item(0, 2, PROMPT * 5))
    staying.send(opened(), score_item(0, 2, PROMPT))
    core.step()
    core.drop_link(1)
    (answer,) = staying.run(score_item(0, 3, [*PROMPT, 3], num_kept_tokens=0))
    assert isinstance(answer, Scores)
    core.drop_link(2)
    assert all_pages_free(runner)


def test_full_is_refused_and_what_crossed_it_is_ignored(runner: ModelRunner) -> None:
    driver = Driver(build_core(runner))
    fits = runner.sequences.pool.num_pages * runner.page_size // 256
    for number in range(fits):
        driver.run(opened(number, max_length=256), score_item(number, 2, [number, *[1] * 255]))
    events = driver.run(opened(fits), score_item(fits, 2, PROMPT), score_item(fits, 3, PROMPT))
    assert [type(event) for event in events] == [Refused]
    assert events[0].session == fits
    assert events[0].retry_after_ms > 0
    driver.run(Release(0, 3))
    assert isinstance(driver.run(opened(fits, generation=4), score_item(fits, 5, PROMPT))[0], Scores)
    driver.run(*[Release(i, 9) for i in range(1, fits + 1)])
    assert all_pages_free(runner)


BAD_ITEMS: list[tuple[str, Score]] = [
    ("token_ids", Score(0, 2, 0, EMPTY_PREFIX, ())),
    ("token_ids", score_item(0, 2, [272])),
    ("token_ids", score_item(0, 2, [-1])),
    ("token_ids", score_item(0, 2, [1] * 41)),
    ("draft_token_ids", score_item(0, 2, [1] * 39, [1, 2])),
    ("draft_token_ids", score_item(0, 2, PROMPT, [257])),
    ("draft_token_ids", score_item(0, 2, PROMPT, [-3])),
    ("num_kept_tokens", Score(0, 2, -1, EMPTY_PREFIX, (1,))),
    ("support", score_item(0, 2, PROMPT, [1])),
    ("support", score_item(0, 2, PROMPT, [1], support=Support(np.array([1, 1], np.int32), np.array([1, 2], np.int32)))),
    ("support", score_item(0, 2, PROMPT, [1], support=Support(np.array([2], np.int32), np.array([1], np.int32)))),
    ("support", score_item(0, 2, PROMPT, [1], support=Support(np.array([-1], np.int32), np.array([], np.int32)))),
    ("support", score_item(0, 2, PROMPT, [1], support=Support(np.array([1], np.int32), np.array([257], np.int32)))),
]


@pytest.mark.parametrize(("field", "item"), BAD_ITEMS)
def test_a_bad_item_fails_its_session_alone(driver: Driver, runner: ModelRunner, field: str, item: Score) -> None:
    beside = score_item(1, 2, PROMPT)
    events = driver.run(opened(sampling=SamplingParams()), opened(1), item, beside)
    failed, scores = events
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.generation, failed.code, failed.field) == (0, 2, "InvalidRequestError", field)
    assert isinstance(scores, Scores)
    assert driver.run(replace(item, generation=3)) == []
    driver.run(Release(1, 3))
    assert all_pages_free(runner)


def runner_with_a_bad_token(folder: Path) -> ModelRunner:
    """A target that token 66 makes say NaN."""
    build_tiny_model(folder)
    model: Any = load_reference(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[66] = torch.nan
    model.save_pretrained(folder)
    return ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64)


def test_logits_that_are_no_numbers_fail_their_session_alone(tmp_path: Path) -> None:
    runner = runner_with_a_bad_token(tmp_path / "model")
    driver = Driver(build_core(runner))
    events = driver.run(
        opened(0),
        opened(1),
        opened(2, sampling=SamplingParams()),
        score_item(0, 2, PROMPT),
        score_item(1, 2, [66, *PROMPT]),
        score_item(2, 2, [3, 66], [4], support=Support(np.array([1], np.int32), np.array([4], np.int32))),
    )
    by_session = {event.session: event for event in events}
    assert isinstance(by_session[0], Scores)
    for session in (1, 2):
        assert isinstance(by_session[session], SessionFailed)
        assert by_session[session].code == "NonFiniteLogitsError"
    driver.run(Release(0, 3))
    assert all_pages_free(runner)
    fresh = driver.run(opened(3), score_item(3, 2, PROMPT))  # in the pages that held NaN
    assert fresh[0].form == by_session[0].form
    driver.core.drop_link(0)


def test_logits_that_are_no_numbers_fail_their_session_of_a_batch_alone(tmp_path: Path) -> None:
    driver, sessions = Driver(build_core(runner_with_a_bad_token(tmp_path / "model"))), range(6)
    texts = [[*PROMPT, 20 + session, 66 if session == 3 else 30] for session in sessions]
    driver.run(*(opened(session) for session in sessions), *(score_item(one, 2, PROMPT) for one in sessions))
    for count, generation in ((9, 3), (10, 4)):  # the first brings the sessions together
        items = [score_item(one, generation, texts[one][:count], DRAFTS, num_kept_tokens=count - 1) for one in sessions]
        columns = target_commands_from_proto(target_commands_to_proto(items))
        answers = {event.session: event for event in driver.run(*columns)}
    failed = answers.pop(3)
    assert isinstance(failed, SessionFailed)
    assert (failed.generation, failed.code) == (4, "NonFiniteLogitsError")
    alone = Driver(build_core(runner_with_a_bad_token(tmp_path / "other")))
    for session, answer in answers.items():
        (expected,) = alone.run(opened(session), score_item(session, 4, texts[session], DRAFTS))
        assert (answer.generation, answer.form) == (4, expected.form)


def test_a_session_with_nothing_allowed_fails_alone(driver: Driver) -> None:
    banned = opened(0, num_token_ids=2, banned_token_ids=(0, 1))
    failed, scores = driver.run(banned, opened(1), score_item(0, 2, PROMPT), score_item(1, 2, PROMPT))
    assert isinstance(failed, SessionFailed)
    assert isinstance(scores, Scores)


def test_reports_tell_true_times_and_pages(driver: Driver, runner: ModelRunner) -> None:
    driver.run(opened(), opened(1), score_item(0, 2, PROMPT * 4), score_item(1, 2, PROMPT))
    assert len(driver.reports) == 2
    for report in driver.reports:
        assert report.forward_ns > 0
        assert report.sample_ns > 0
        assert report.queue_ns + report.forward_ns + report.sample_ns <= report.total_ns
    assert driver.reports[0].num_pages_free > driver.reports[1].num_pages_free == runner.sequences.pool.num_free
    assert driver.reports[0].batch_size == 2
    assert driver.reports[0].num_tokens <= 16
