"""Traced items of decode batches: served with the others, and recorded when their answers have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.batched import AnswerBatch
from outrider.recording import AheadRecord, AnyRecord, ItemRecord
from outrider.serving.decode.step import joined
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.service_spans import ahead_spans, item_spans
from outrider.types import SamplingParams
from tests.serving.decode import test_begun
from tests.serving.decode.test_direct_answers import NUM_SESSIONS, Caller
from tests.support.core_driver import extend_item

NOT_SAMPLED = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
STAGES = names.QUEUE, names.FORWARD, names.SAMPLE, names.WAIT


def parent(session: int) -> str:
    return f"00-{session + 1:032x}-{1:016x}-01"


class Records:
    """Recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[ItemRecord] = []
        self.ahead: list[AheadRecord] = []

    def ended(self, records: Sequence[AnyRecord]) -> None:
        self.items += [record for record in records if isinstance(record, ItemRecord)]
        self.ahead += [record for record in records if isinstance(record, AheadRecord)]


def traced_caller(role: str) -> tuple[Caller, Records]:
    caller = Caller(role)
    caller.postprocess()
    records = Records()
    caller.core.recorder = records
    return caller, records


def plain(batched: AnswerBatch[Any]) -> list[list[int]]:
    return [column.tolist() for column in (batched.sessions, batched.base_lengths, batched.counts, batched.token_ids)]


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_step_with_traced_items_is_one_step_with_the_same_answers(role: str) -> None:
    caller, records = traced_caller(role)
    twin, _ = traced_caller(role)
    twin.send(twin.batched(twin.items()))
    twin.run()
    items = caller.items()
    parents = ["", parent(1), NOT_SAMPLED, parent(3)]
    traced = [replace(item, trace_parent=each) for item, each in zip(items, parents, strict=True)]
    num_whole = caller.num_whole()
    caller.send(caller.batched(traced))
    caller.run()
    assert caller.num_whole() == num_whole + 1
    (answers,), _ = caller.answered()
    (expected,), _ = twin.answered()
    assert plain(answers) == plain(expected)

    assert [(item.session, item.generation, item.trace_parent) for item in records.items] == [
        (place, items[place].generation, parents[place]) for place in (1, 3)
    ]
    (forward,) = {id(each): each for item in records.items for each in item.forwards}.values()
    assert forward.items == records.items and forward.batch_size == NUM_SESSIONS
    assert {item.outcome for item in records.items} == {"Proposal" if role == "draft" else "Scores"}
    (timing,) = answers.timings([1])
    assert all(item.timing == timing for item in records.items)
    spans = [span for item in records.items for span in item_spans(item, "item")]
    (shared,) = [span for span in spans if span.name == names.FORWARD]
    assert [link.trace_id for link in shared.links] == [f"{place + 1:032x}" for place in (1, 3)]
    for item in [span for span in spans if span.name == "item"]:
        assert timing is not None and item.duration_ns == timing.total_ns


def test_an_item_that_has_a_forward_to_itself_has_all_its_stages_below_it() -> None:
    caller, records = traced_caller("target")
    items = caller.items()
    items[2] = replace(items[2], trace_parent=parent(2))
    caller.send(caller.batched(items))
    caller.run()
    (item,) = records.items
    above, *below = item_spans(item, "item")
    assert sorted(span.name for span in below) == sorted(STAGES)
    assert sum(span.duration_ns for span in below) == above.duration_ns
    assert all(span.parent_id == above.span_id for span in below)


@pytest.mark.parametrize("is_first", [True, False])
def test_columns_that_are_joined_keep_their_traces(*, is_first: bool) -> None:
    caller = Caller("target")
    items = caller.items()
    parts = [caller.batched(items[:1]), caller.batched([replace(each, trace_parent="t") for each in items[1:]])]
    found = joined(parts if is_first else parts[::-1])
    assert found is not None
    assert found.trace_parents == (["", "t", "t", "t"] if is_first else ["t", "t", "t", ""])
    plain_parts = joined([caller.batched(items[:1]), caller.batched(items[1:])])
    assert plain_parts is not None and not plain_parts.trace_parents


def test_traced_items_of_a_step_that_is_split_are_recorded_once() -> None:
    caller, records = traced_caller("target")
    items = [replace(item, trace_parent=parent(place)) for place, item in enumerate(caller.items())]
    caller.run_released(caller.batched(items))
    assert sorted((item.session, item.outcome) for item in records.items) == [
        (0, "released"), (1, "Scores"), (2, "Scores"), (3, "Scores"),
    ]  # fmt: skip
    assert [len(item.forwards) for item in sorted(records.items, key=lambda item: item.session)] == [0, 1, 1, 1]


def test_work_ahead_is_recorded_for_the_sessions_that_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(session: int, *fields: Any, **more: Any) -> Any:
        return replace(extend_item(session, *fields, **more), trace_parent=parent(1) if session == 1 else "")

    monkeypatch.setattr(test_begun, "extend_item", extend)
    core, records = test_begun.stand_in_core(), Records()
    core.recorder = records
    sessions = test_begun.Sessions(core, 3, sampling=SamplingParams(temperature=0.0))
    for _ in range(2):
        sessions.ask(sessions.texts)
        rows = [sessions.judge_all(text) for text in sessions.texts]
    assert not records.ahead
    sessions.begin(*rows)
    core.post_step()
    (found,) = records.ahead
    assert (found.trace_parent, found.session) == (parent(1), 1)
    assert found.base_length == len(sessions.texts[1].tokens)
    assert found.ended_ns > found.started_ns and found.batch_size == len(sessions.texts)
    (span,) = ahead_spans(found, "draft")
    assert (span.name, span.duration_ns, span.parent_id) == (
        names.AHEAD,
        found.ended_ns - found.started_ns,
        "0" * 15 + "1",
    )
    sessions.ask(sessions.texts)
    assert records.items[-1].session == 1 and not records.items[-1].forwards
    assert records.ahead == [found]


@pytest.mark.parametrize("last_parent", ["", NOT_SAMPLED])
def test_work_ahead_is_recorded_no_longer_than_the_items(monkeypatch: pytest.MonkeyPatch, last_parent: str) -> None:
    parents = [parent(1)]

    def extend(*fields: Any, **more: Any) -> Any:
        return replace(extend_item(*fields, **more), trace_parent=parents[-1])

    monkeypatch.setattr(test_begun, "extend_item", extend)
    core, records = test_begun.stand_in_core(), Records()
    core.recorder = records
    sessions = test_begun.Sessions(core, 3, sampling=SamplingParams(temperature=0.0))
    for parents[-1] in (parent(1), parent(1), last_parent):
        sessions.ask(sessions.texts)
        rows = [sessions.judge_all(text) for text in sessions.texts]
    sessions.begin(*rows)
    core.post_step()
    assert records.items and not records.ahead
