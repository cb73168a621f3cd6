"""Every value through bytes and back; what breaks the contract is refused on arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.batched import one_by_one
from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.generation import TO_THE_END, TokenizerFiles
from outrider.ports import EventBatch, Scores
from outrider.transport.convert import commands, describing, events, generation, requests
from outrider.transport.convert.chat import chat_from_proto
from outrider.types import SparseEvidence, TokenScores
from outrider.v1 import chat_pb2, generation_pb2, link_pb2, sampling_pb2
from tests.support.equality import same
from tests.support.examples import SAME_EACH_TIME
from tests.transport import values

Case = tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]


def without_batch(batch: EventBatch[Any]) -> EventBatch[Any]:
    return EventBatch(values.by_session(batch.all_events()), batch.report)


CASES: dict[str, Case] = {
    "draft commands": (
        values.draft_commands,
        commands.draft_commands_to_proto,
        lambda message: values.by_session(one_by_one(commands.draft_commands_from_proto(message))),
    ),
    "target commands": (
        values.target_commands,
        commands.target_commands_to_proto,
        lambda message: values.by_session(one_by_one(commands.target_commands_from_proto(message))),
    ),
    "draft events": (
        values.batches(st.one_of(values.proposals(), values.common_events)),
        events.draft_events_to_proto,
        lambda message: without_batch(events.draft_events_from_proto(message)),
    ),
    "target events": (
        values.batches(st.one_of(values.scores, values.chunks, values.common_events)),
        events.target_events_to_proto,
        lambda message: without_batch(events.target_events_from_proto(message)),
    ),
    "description": (values.descriptions, describing.description_to_proto, describing.description_from_proto),
    "request": (values.requests, requests.request_to_proto, requests.request_from_proto),
    "result": (values.results, generation.result_to_proto, generation.result_from_proto),
    "delta": (
        values.deltas,
        lambda delta: generation.delta_to_proto(delta).delta,
        generation.delta_from_proto,
    ),
    "started": (
        values.started,
        lambda started: generation.started_to_proto(started).started,
        generation.started_from_proto,
    ),
    "model info": (values.infos, generation.info_to_proto, generation.info_from_proto),
}


NUM_EXAMPLES = {"description": 12}
"""Examples of cases whose values are large: each holds a whole table of costs."""


@pytest.mark.parametrize("name", CASES)
def test_round_trip_through_bytes(name: str) -> None:
    strategy, write, read = CASES[name]

    @settings(SAME_EACH_TIME, max_examples=NUM_EXAMPLES.get(name, 60))
    @given(strategy)
    def check(value: Any) -> None:
        message = write(value)
        again = read(type(message).FromString(message.SerializeToString()))
        assert same(again, value), f"{again} is not {value}"

    check()


def test_equality_of_the_tests_sees_a_single_bit() -> None:
    one = SparseEvidence(np.array([1], np.int32), np.array([3], np.int32), np.array([1.0], np.float32))
    other = SparseEvidence(one.counts, one.token_ids, np.nextafter(one.probs, np.float32(2), dtype=np.float32))
    assert same(one, one) and not same(one, other)


def test_unset_oneofs_and_unknown_enums_are_refused() -> None:
    with pytest.raises(ProtocolError):
        events.draft_events_from_proto(link_pb2.DraftEvents(events=[link_pb2.DraftEvent()]))
    with pytest.raises(ProtocolError):
        events.target_events_from_proto(link_pb2.TargetEvents(events=[link_pb2.TargetEvent()]))
    with pytest.raises(ProtocolError):
        commands.draft_commands_from_proto(link_pb2.DraftCommands(commands=[link_pb2.DraftCommand()]))
    wrongs: list[dict[str, Any]] = [{}, {"judging_rule": 99}, {"judging_rule": 1, "logprobs_mode": 99}]
    for wrong in wrongs:
        command = link_pb2.DraftCommand(open=link_pb2.Open(session=1, **wrong))
        with pytest.raises(ProtocolError, match=r"judging_rule|logprobs_mode"):
            commands.draft_commands_from_proto(link_pb2.DraftCommands(commands=[command]))
    with pytest.raises(ProtocolError, match="finish_reason"):
        generation.result_from_proto(generation_pb2.GenerationResult())
    with pytest.raises(ProtocolError, match="role"):
        describing.description_from_proto(link_pb2.ModelDescription(role="other"))


def test_an_unknown_method_in_a_request_names_the_field() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        unknown: Any = 77
        requests.request_from_proto(generation_pb2.GenerateRequest(acceptance_method=unknown))
    assert caught.value.field == "acceptance_method"


def test_what_a_request_leaves_out_has_the_documented_default() -> None:
    from outrider.generation import DEFAULTABLE, GenerationRequest

    bare = generation_pb2.GenerateRequest(prompt_text="x")
    assert requests.request_from_proto(bare) == GenerationRequest(prompt="x", defaulted=frozenset(DEFAULTABLE))
    zero = generation_pb2.GenerateRequest(prompt_text="x", sampling=sampling_pb2.SamplingParams(temperature=0, top_p=0))
    assert requests.request_from_proto(zero).sampling.temperature == 0
    assert requests.request_from_proto(zero).sampling.top_p == 0


def test_a_value_that_does_not_fit_its_field_breaks_the_contract() -> None:
    wrong = EventBatch((Scores(1, 2, 3, TokenScores((-1,))),))
    with pytest.raises(ProtocolError):
        events.target_events_to_proto(wrong)


def test_a_chat_says_what_a_server_needs_even_where_its_caller_left_it_out() -> None:
    bare = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", content="hi")])
    assert chat_from_proto(bare) == ChatPrompt(({"role": "user", "content": "hi"},))
    request = requests.request_from_proto(generation_pb2.GenerateRequest(chat=bare))
    assert request.max_tokens == TO_THE_END
    bare.continue_final_message = True
    assert not chat_from_proto(bare).add_generation_prompt


@pytest.mark.parametrize("text", ["{", "[]", "1", "[" * 100_000])
def test_json_of_a_chat_that_cannot_be_read_names_its_field(text: str) -> None:
    message = chat_pb2.ChatMessage(role="user", fields_json=text)
    with pytest.raises(InvalidRequestError) as caught:
        chat_from_proto(chat_pb2.Chat(messages=[message]))
    assert caught.value.field == "messages[0]"
    with pytest.raises(InvalidRequestError) as caught:
        chat_from_proto(chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user")], tools_json=["{}", text]))
    assert caught.value.field == "tools[1]"


def test_tokenizer_files_survive_the_wire() -> None:
    for files in (TokenizerFiles({"tokenizer.json": b"x"}, 0, "hash"), TokenizerFiles()):
        assert generation.tokenizer_from_proto(generation.tokenizer_to_proto(files)) == files
