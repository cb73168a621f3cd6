"""Generations, ended sessions, base lengths and reservations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import NonFiniteLogitsError
from outrider.kv_cache import AttentionReach, KVCacheManager, KVSequence, PagePool
from outrider.ports import Open, Release, SessionFailed, SessionLost
from outrider.prefix_hash import prefix_hash
from outrider.serving import session_registry as session_registry_module
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.types import JudgingRule, SamplingParams

OPEN = Open(
    session=7,
    generation=1,
    sampling=SamplingParams(),
    seed=3,
    judging_rule=JudgingRule.REJECTION,
    prompt_length=4,
    max_length=8,
    num_token_ids=50,
)


@pytest.fixture
def table() -> KVCacheManager:
    return KVCacheManager(PagePool(4, 4))


@pytest.fixture
def session_registry(table: KVCacheManager) -> SessionRegistry[KVSequence]:
    return SessionRegistry(table, Limits(vocab_size=50, max_model_len=16, trims=False))


def found(session_registry: SessionRegistry[KVSequence], generation: int = 2) -> Session[KVSequence]:
    session = session_registry.find(0, 7, generation)
    assert isinstance(session, Session)
    return session


def test_a_session_takes_pages_as_it_grows_and_release_gives_them_back(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    assert session_registry.open(0, OPEN) is None
    assert table.pool.num_free == 4
    table.extend(found(session_registry).sequence, [1, 2, 3, 4, 5])
    assert table.pool.num_free == 2
    assert session_registry.release(0, Release(7, 2))
    assert table.pool.num_free == 4
    table.check_integrity()


def test_a_session_cut_to_tokens_that_attend_to_pages_given_back_is_lost() -> None:
    manager = KVCacheManager(PagePool(16, 4), reach=AttentionReach(window=8, num_rewind_tokens=4))
    sessions = SessionRegistry(manager, Limits(vocab_size=50, max_model_len=64, trims=False))
    sessions.open(0, replace(OPEN, max_length=64))
    session = found(sessions)
    manager.extend(session.sequence, range(40))
    sessions.commit(session, 40)
    assert manager.num_pages(session.sequence) == 3
    lost = sessions.rewind(session, 30, prefix_hash(range(30)))
    assert isinstance(lost, SessionLost)
    assert "were given back" in lost.reason
    assert sessions.rewind(session, 37, prefix_hash(range(37))) is None


@pytest.mark.parametrize("end", ["refuse", "preempt"])
def test_a_session_without_pages_is_remembered_as_ended_until_it_is_opened_anew(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager, end: str
) -> None:
    session_registry.open(0, OPEN)
    session = found(session_registry)
    table.extend(session.sequence, [1, 2, 3])
    event = session_registry.refuse(session, "full") if end == "refuse" else session_registry.preempt(session)
    assert (event.session, event.generation) == (7, 2)
    assert event.retry_after_ms > 0
    assert table.pool.num_free == 4
    assert session_registry.find(0, 7, 3) is None
    assert session_registry.open(0, replace(OPEN, generation=4)) is None
    assert found(session_registry, 5).open.generation == 4


def test_age_is_the_arrival_and_then_the_request(session_registry: SessionRegistry[KVSequence]) -> None:
    for number, (arrival_ns, request_id) in enumerate([(5, "a"), (3, "b"), (3, "a"), (9, "")]):
        session_registry.open(0, replace(OPEN, session=number, arrival_ns=arrival_ns, request_id=request_id))
    ages = sorted(session_registry.sessions(), key=lambda session: session.age)
    assert [session.open.session for session in ages] == [2, 1, 0, 3]


def test_older_items_are_ignored(session_registry: SessionRegistry[KVSequence]) -> None:
    session_registry.open(0, OPEN)
    found(session_registry, 5)
    assert session_registry.find(0, 7, 4) is None
    assert isinstance(session_registry.find(0, 7, 5), Session)
    assert session_registry.open(0, OPEN) is None
    assert not session_registry.release(0, Release(7, 4))
    assert isinstance(session_registry.find(0, 7, 6), Session)


def test_a_released_session_ignores_items_and_an_unknown_one_is_lost(
    session_registry: SessionRegistry[KVSequence],
) -> None:
    assert isinstance(session_registry.find(0, 7, 0), SessionLost)
    session_registry.open(0, OPEN)
    session_registry.release(0, Release(7, 2))
    assert session_registry.find(0, 7, 9) is None
    assert isinstance(session_registry.find(1, 7, 9), SessionLost)  # another link's session of the same number


def test_opening_anew_starts_empty_in_the_same_room(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    session_registry.open(0, replace(OPEN, max_length=16))
    table.extend(found(session_registry).sequence, [1, 2, 3])
    assert session_registry.open(0, replace(OPEN, max_length=16, generation=3)) is None
    assert found(session_registry, 4).sequence.length == 0
    table.check_integrity()
    assert len(table) == 1


def test_the_same_open_twice_is_one_and_another_with_its_generation_fails(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    session_registry.open(0, OPEN)
    assert session_registry.open(0, OPEN) is None
    failed = session_registry.open(0, replace(OPEN, seed=4))
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.field) == ("InvalidRequestError", "session")
    assert table.pool.num_free == 4


def test_rewind_keeps_what_is_there_and_the_same_text(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    session_registry.open(0, OPEN)
    session = found(session_registry)
    table.extend(session.sequence, [1, 2, 3])
    too_long = session_registry.rewind(session, 4, prefix_hash([1, 2, 3, 4]))
    assert isinstance(too_long, SessionLost)
    assert "4" in too_long.reason
    other = session_registry.rewind(session, 2, prefix_hash([2, 1]))
    assert isinstance(other, SessionLost)
    assert session.sequence.token_ids == [1, 2, 3]
    assert session_registry.rewind(session, 2, prefix_hash([1, 2])) is None
    assert session.sequence.token_ids == [1, 2]


def test_failing_frees_and_names_the_error(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    session_registry.open(0, OPEN)
    failed = session_registry.fail(0, 7, 2, NonFiniteLogitsError("nan"))
    assert failed == SessionFailed(7, 2, "NonFiniteLogitsError", "nan")
    assert table.pool.num_free == 4
    assert session_registry.find(0, 7, 3) is None


def test_dropping_a_link_frees_its_sessions_alone(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    for link_id in (0, 1):
        session_registry.open(link_id, OPEN)
        session = session_registry.find(link_id, 7, 1)
        assert isinstance(session, Session)
        table.extend(session.sequence, [1, 2, 3])
    session_registry.drop_link(0)
    assert table.pool.num_free == 3
    assert len(session_registry) == 1
    assert isinstance(session_registry.find(1, 7, 2), Session)
    assert isinstance(session_registry.find(0, 7, 2), SessionLost)


@pytest.mark.parametrize("ends_link", [False, True])
def test_a_session_is_counted_until_its_pages_are_free(
    session_registry: SessionRegistry[KVSequence],
    table: KVCacheManager,
    monkeypatch: pytest.MonkeyPatch,
    ends_link: bool,
) -> None:
    counted: list[int] = []
    release = table.release

    def counting(sequence: KVSequence) -> None:
        counted.append(len(session_registry))
        release(sequence)

    monkeypatch.setattr(table, "release", counting)
    session_registry.open(0, OPEN)
    table.extend(found(session_registry).sequence, [1, 2, 3])
    if ends_link:
        session_registry.drop_link(0)
    else:
        session_registry.release(0, Release(7, 2))
    assert (counted, len(session_registry), table.pool.num_free) == ([1], 0, 4)


def test_ended_sessions_that_are_remembered_are_bounded(
    session_registry: SessionRegistry[KVSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_registry_module, "MAX_ENDED_SESSIONS", 3)
    for session in range(5):
        session_registry.open(0, replace(OPEN, session=session))
        session_registry.release(0, Release(session, 2))
    assert isinstance(session_registry.find(0, 0, 3), SessionLost)
    assert session_registry.find(0, 4, 3) is None


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
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager, field: str, changes: dict[str, Any]
) -> None:
    failed = session_registry.open(0, replace(OPEN, **changes))
    assert isinstance(failed, SessionFailed)
    assert (failed.code, failed.field) == ("InvalidRequestError", field)
    assert table.pool.num_free == 4
    assert session_registry.find(0, 7, 2) is None


def test_a_draft_takes_a_longer_session_as_far_as_it_fits(table: KVCacheManager) -> None:
    session_registry = SessionRegistry(table, Limits(vocab_size=0, max_model_len=16, trims=True))
    assert session_registry.open(0, replace(OPEN, max_length=1000)) is None
    assert found(session_registry).reserved_length == 16


def test_a_prefix_is_known_by_the_sessions_key(
    session_registry: SessionRegistry[KVSequence], table: KVCacheManager
) -> None:
    session_registry.open(0, replace(OPEN, prefix_hash_key=b"k" * 16))
    session = found(session_registry)
    table.extend(session.sequence, [1, 2, 3])
    assert session_registry.rewind(session, 3, prefix_hash([1, 2, 3], b"k" * 16)) is None
    assert session.sequence.length == 3
    too_long = session_registry.open(0, replace(OPEN, session=8, prefix_hash_key=b"k" * 65))
    assert isinstance(too_long, SessionFailed)
    assert too_long.field == "prefix_hash_key"
