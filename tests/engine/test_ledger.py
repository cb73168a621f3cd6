"""Generations, tombstones, base lengths and reservations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.engine import ledger as ledger_module
from outrider.engine.ledger import Ledger, Limits, Session
from outrider.errors import NonFiniteLogitsError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.ports import Open, Release, SessionFailed, SessionLost
from outrider.types import AcceptanceMethod, SamplingParams, extend_prefix_hash

OPEN = Open(
    session=7,
    generation=1,
    sampling=SamplingParams(),
    seed=3,
    acceptance_method=AcceptanceMethod.REJECTION,
    prompt_length=4,
    max_length=8,
    num_token_ids=50,
)


@pytest.fixture
def table() -> KVCacheManager:
    return KVCacheManager(PagePool(4, 4))


@pytest.fixture
def ledger(table: KVCacheManager) -> Ledger[KVSequence]:
    return Ledger(table, Limits(vocab_size=50, max_model_len=16, trims=False))


def found(ledger: Ledger[KVSequence], generation: int = 2) -> Session[KVSequence]:
    session = ledger.find(0, 7, generation)
    assert isinstance(session, Session)
    return session


def test_a_session_takes_pages_as_it_grows_and_release_gives_them_back(
    ledger: Ledger[KVSequence], table: KVCacheManager
) -> None:
    assert ledger.open(0, OPEN) is None
    assert table.pool.num_free == 4
    table.extend(found(ledger).text, [1, 2, 3, 4, 5])
    assert table.pool.num_free == 2
    assert ledger.release(0, Release(7, 2))
    assert table.pool.num_free == 4
    table.check_integrity()


@pytest.mark.parametrize("end", ["refuse", "preempt"])
def test_a_session_without_pages_leaves_a_tombstone_until_it_is_opened_anew(
    ledger: Ledger[KVSequence], table: KVCacheManager, end: str
) -> None:
    ledger.open(0, OPEN)
    session = found(ledger)
    table.extend(session.text, [1, 2, 3])
    event = ledger.refuse(session, "full") if end == "refuse" else ledger.preempt(session)
    assert (event.session, event.generation) == (7, 2)
    assert event.retry_after_ms > 0
    assert table.pool.num_free == 4
    assert ledger.find(0, 7, 3) is None
    assert ledger.open(0, replace(OPEN, generation=4)) is None
    assert found(ledger, 5).open.generation == 4


def test_age_is_the_arrival_and_then_the_request(ledger: Ledger[KVSequence]) -> None:
    for number, (arrival_ns, request_id) in enumerate([(5, "a"), (3, "b"), (3, "a"), (9, "")]):
        ledger.open(0, replace(OPEN, session=number, arrival_ns=arrival_ns, request_id=request_id))
    ages = sorted(ledger.sessions(), key=lambda session: session.age)
    assert [session.open.session for session in ages] == [2, 1, 0, 3]


def test_older_items_are_ignored(ledger: Ledger[KVSequence]) -> None:
    ledger.open(0, OPEN)
    found(ledger, 5)
    assert ledger.find(0, 7, 4) is None
    assert isinstance(ledger.find(0, 7, 5), Session)
    assert ledger.open(0, OPEN) is None
    assert not ledger.release(0, Release(7, 4))
    assert isinstance(ledger.find(0, 7, 6), Session)


def test_a_released_session_ignores_items_and_an_unknown_one_is_lost(ledger: Ledger[KVSequence]) -> None:
    assert isinstance(ledger.find(0, 7, 0), SessionLost)
    ledger.open(0, OPEN)
    ledger.release(0, Release(7, 2))
    assert ledger.find(0, 7, 9) is None
    assert isinstance(ledger.find(1, 7, 9), SessionLost)  # another link's session of the same number


def test_opening_anew_starts_empty_in_the_same_room(ledger: Ledger[KVSequence], table: KVCacheManager) -> None:
    ledger.open(0, replace(OPEN, max_length=16))
    table.extend(found(ledger).text, [1, 2, 3])
    assert ledger.open(0, replace(OPEN, max_length=16, generation=3)) is None
    assert found(ledger, 4).text.length == 0
    table.check_integrity()
    assert len(table) == 1


def test_the_same_open_twice_is_one_and_another_with_its_generation_fails(
    ledger: Ledger[KVSequence], table: KVCacheManager
) -> None:
    ledger.open(0, OPEN)
    assert ledger.open(0, OPEN) is None
    failed = ledger.open(0, replace(OPEN, seed=4))
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.field) == ("InvalidRequestError", "session")
    assert table.pool.num_free == 4


def test_rewind_keeps_what_is_there_and_the_same_text(ledger: Ledger[KVSequence], table: KVCacheManager) -> None:
    ledger.open(0, OPEN)
    session = found(ledger)
    table.extend(session.text, [1, 2, 3])
    too_long = ledger.rewind(session, 4, extend_prefix_hash(0, [1, 2, 3, 4]))
    assert isinstance(too_long, SessionLost)
    assert "4" in too_long.reason
    other = ledger.rewind(session, 2, extend_prefix_hash(0, [2, 1]))
    assert isinstance(other, SessionLost)
    assert session.text.token_ids == [1, 2, 3]
    assert ledger.rewind(session, 2, extend_prefix_hash(0, [1, 2])) is None
    assert session.text.token_ids == [1, 2]


def test_failing_frees_and_names_the_error(ledger: Ledger[KVSequence], table: KVCacheManager) -> None:
    ledger.open(0, OPEN)
    failed = ledger.fail(0, 7, 2, NonFiniteLogitsError("nan"))
    assert failed == SessionFailed(7, 2, "NonFiniteLogitsError", "nan")
    assert table.pool.num_free == 4
    assert ledger.find(0, 7, 3) is None


def test_dropping_a_link_frees_its_sessions_alone(ledger: Ledger[KVSequence], table: KVCacheManager) -> None:
    for link_id in (0, 1):
        ledger.open(link_id, OPEN)
        session = ledger.find(link_id, 7, 1)
        assert isinstance(session, Session)
        table.extend(session.text, [1, 2, 3])
    ledger.drop_link(0)
    assert table.pool.num_free == 3
    assert len(ledger) == 1
    assert isinstance(ledger.find(1, 7, 2), Session)
    assert isinstance(ledger.find(0, 7, 2), SessionLost)


def test_tombstones_are_bounded(ledger: Ledger[KVSequence], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_TOMBSTONES", 3)
    for session in range(5):
        ledger.open(0, replace(OPEN, session=session))
        ledger.release(0, Release(session, 2))
    assert isinstance(ledger.find(0, 0, 3), SessionLost)
    assert ledger.find(0, 4, 3) is None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_length", {"max_length": 17}),
        ("max_length", {"max_length": 0, "prompt_length": 0}),
        ("prompt_length", {"prompt_length": 9}),
        ("num_token_ids", {"num_token_ids": 51}),
        ("num_token_ids", {"num_token_ids": 0}),
        ("num_logprobs", {"num_logprobs": -1}),
        ("temperature", {"sampling": SamplingParams(temperature=float("nan"))}),
        ("temperature", {"sampling": SamplingParams(temperature=-1)}),
        ("top_p", {"sampling": SamplingParams(top_p=0)}),
        ("min_p", {"sampling": SamplingParams(min_p=1.5)}),
        ("top_k", {"sampling": SamplingParams(top_k=-2)}),
        ("repetition_penalty", {"sampling": SamplingParams(repetition_penalty=0)}),
        ("logit_bias", {"sampling": SamplingParams(logit_bias=((50, 1.0),))}),
        ("allowed_token_ids", {"sampling": SamplingParams(allowed_token_ids=(-1,))}),
        ("bad_words", {"sampling": SamplingParams(bad_words=((1, 99),))}),
        ("banned_token_ids", {"banned_token_ids": (50,)}),
    ],
)
def test_a_bad_open_fails_and_names_the_field(
    ledger: Ledger[KVSequence], table: KVCacheManager, field: str, changes: dict[str, Any]
) -> None:
    failed = ledger.open(0, replace(OPEN, **changes))
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.field) == ("InvalidRequestError", field)
    assert table.pool.num_free == 4
    assert ledger.find(0, 7, 2) is None


def test_a_draft_takes_a_longer_session_as_far_as_it_fits(table: KVCacheManager) -> None:
    ledger = Ledger(table, Limits(vocab_size=0, max_model_len=16, trims=True))
    assert ledger.open(0, replace(OPEN, max_length=1000)) is None
    assert found(ledger).reserved_length == 16
