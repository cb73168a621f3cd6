"""Bounds of the items of a link, both ways: one that breaks a bound ends its session and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider import limits, ports
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES, message_limits
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
)
from outrider.transport.convert.describing import description_from_proto
from outrider.transport.convert.events import draft_events_from_proto, target_events_from_proto
from outrider.transport.convert.step_answers import proposals_from_proto
from outrider.transport.link.splitting import split_commands
from outrider.transport.link.versions import METADATA as VERSION
from outrider.v1 import link_pb2 as pb
from outrider.v1 import sampling_pb2
from outrider.v1.link_pb2_grpc import DraftServiceStub
from outrider_draft.service import DraftService
from tests.transport.conftest import Serve

MANY_DRAFTS = limits.MAX_DRAFT_LENGTH + 1
Fill = Callable[[Any], None]


def ids(name: str, count: int) -> Fill:
    return lambda message: getattr(message, name).extend([1] * count)


def text(name: str, count: int) -> Fill:
    return lambda message: setattr(message, name, "x" * count)


def array(name: str, count: int) -> Fill:
    return lambda message: setattr(message, name, bytes(4 * count))


OPEN: dict[str, Fill] = {
    "eos_token_ids": ids("eos_token_ids", 2050),
    "banned_token_ids": ids("banned_token_ids", 1025),
    "request_id": text("request_id", 257),
    "trace_id": text("trace_id", 257),
    "cache_salt": text("cache_salt", 257),
    "hidden_state_layers": ids("hidden_state_layers", 17),
    "prefix_hash_key": lambda message: setattr(message, "prefix_hash_key", bytes(65)),
}
SAMPLING: dict[str, Fill] = {
    "logit_bias": lambda message: message.logit_bias.extend([sampling_pb2.LogitBias()] * 1025),
    "bad_words": lambda message: message.bad_words.extend([sampling_pb2.TokenSequence()] * 2049),
    "allowed_token_ids": ids("allowed_token_ids", (1 << 20) + 1),
}


def variable_fields(kind: type[Message]) -> set[str]:
    sizeless = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {field.name for field in kind.DESCRIPTOR.fields if field.is_repeated or field.type in sizeless}


@pytest.mark.parametrize(
    ("kind", "bounded"),
    [(pb.Open, OPEN), (sampling_pb2.SamplingParams, SAMPLING)],
    ids=["Open", "SamplingParams"],
)
def test_every_variable_field_of_a_command_is_listed_here(kind: type[Message], bounded: dict[str, Fill]) -> None:
    assert variable_fields(kind) == set(bounded)


def opened(session: int = 1) -> pb.Open:
    rule = pb.JUDGING_RULE_COUPLED
    return pb.Open(session=session, generation=1, judging_rule=rule, max_length=8, num_token_ids=9)


def rejected(commands: tuple[object, ...]) -> ports.Rejected:
    """The command in the middle; those beside it are whole."""
    before, found, after = commands
    assert [type(before), type(after)] == [ports.Release, ports.Release]
    assert isinstance(found, ports.Rejected)
    return found


@pytest.mark.parametrize("field", [*OPEN, *SAMPLING])
def test_an_open_past_a_bound_is_rejected_alone(field: str) -> None:
    command = opened()
    fill, message = (OPEN[field], command) if field in OPEN else (SAMPLING[field], command.sampling)
    fill(message)
    release = pb.DraftCommand(release=pb.Release(session=7))
    commands = pb.DraftCommands(commands=[release, pb.DraftCommand(open=command), release])
    found = rejected(draft_commands_from_proto(commands))
    assert (found.session, found.generation, found.error.field) == (1, 1, field)


def test_an_open_with_too_many_logprobs_is_rejected() -> None:
    command = opened()
    command.num_logprobs = 1025
    release = pb.TargetCommand(release=pb.Release(session=7))
    commands = pb.TargetCommands(commands=[release, pb.TargetCommand(open=command), release])
    assert rejected(target_commands_from_proto(commands)).error.field == "num_logprobs"


def test_a_credit_for_more_steps_than_there_can_be_is_rejected_alone() -> None:
    prepare, release = pb.Prepare(session=3, generation=4), pb.TargetCommand(release=pb.Release(session=7))
    for num_steps, is_rejected in ((1 << 16, False), ((1 << 16) + 1, True)):
        prepare.num_steps = num_steps
        commands = pb.TargetCommands(commands=[release, pb.TargetCommand(prepare=prepare), release])
        _, command, _ = target_commands_from_proto(commands)
        assert isinstance(command, ports.Rejected if is_rejected else ports.Prepare)
        assert (command.session, command.generation) == (3, 4)


def test_what_a_service_says_for_people_is_cut() -> None:
    lost = pb.DraftEvent(session_lost=pb.SessionLost(reason="r" * 10_000))
    failed = pb.DraftEvent(session_failed=pb.SessionFailed(message="m" * 10_000))
    events = draft_events_from_proto(pb.DraftEvents(events=[lost, failed])).events
    assert [len(events[0].reason), len(events[1].message)] == [4096, 4096]  # type: ignore[union-attr]


def test_too_many_items_in_a_message_are_refused_and_never_sent() -> None:
    release = ports.Release(1, 1)
    sizes: list[int] = []

    def encode(commands: Any) -> pb.DraftCommands:
        sizes.append(len(commands))
        return pb.DraftCommands()

    split_commands([release] * (limits.LINK_COMMANDS.most + 1), encode, 1 << 20)
    assert max(sizes) <= limits.LINK_COMMANDS.most < sum(sizes)
    many = [pb.DraftCommand()] * (limits.LINK_COMMANDS.most + 1)
    with pytest.raises(InvalidRequestError, match="commands: has 16385 items; at most 16384"):
        draft_commands_from_proto(pb.DraftCommands(commands=many))
    with pytest.raises(ProtocolError, match="events: has 65537 items; at most 65536"):
        draft_events_from_proto(pb.DraftEvents(events=[pb.DraftEvent()] * (limits.LINK_ITEMS.most + 1)))


def test_allowed_ids_are_bounded_by_the_services_vocabulary() -> None:
    command = opened()
    command.sampling.allowed_token_ids.extend(range(41))
    message = pb.DraftCommands(commands=[pb.DraftCommand(open=command)])
    (found,) = draft_commands_from_proto(message, limits.ModelLimits(num_token_ids=40))
    assert isinstance(found, ports.Rejected)
    assert str(found.error) == "allowed_token_ids: has 41 ids; at most 40, as many as the vocabulary"
    (taken,) = draft_commands_from_proto(message, limits.ModelLimits(num_token_ids=41))
    assert isinstance(taken, ports.Open)


DESCRIPTION_TEXTS = [
    field.name
    for field in pb.ModelDescription.DESCRIPTOR.fields
    if field.type == FieldDescriptor.TYPE_STRING and field.name not in {"role", "plane_kinds"}
]


@pytest.mark.parametrize("name", DESCRIPTION_TEXTS)
def test_a_text_of_a_description_is_bounded(name: str) -> None:
    message = pb.ModelDescription(role="draft")
    setattr(message, name, "x" * 4096)
    description_from_proto(message)
    setattr(message, name, "x" * 4097)
    with pytest.raises(ProtocolError, match=f"{name}: has 4097 characters; at most 4096"):
        description_from_proto(message)


def test_tokenizer_files_are_bounded_by_name_and_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    named = pb.ModelDescription(role="draft", tokenizer_files=[pb.TokenizerFile(name="x" * 4097)])
    with pytest.raises(ProtocolError, match="tokenizer_files: has 4097 characters"):
        description_from_proto(named)
    monkeypatch.setattr(limits, "TOKENIZER_BYTES", limits.Bound(10, "bytes in all"))
    files = [pb.TokenizerFile(name=name, content=b"123456") for name in ("a", "b")]
    with pytest.raises(ProtocolError, match="tokenizer_files: has 12 bytes in all; at most 10"):
        description_from_proto(pb.ModelDescription(role="draft", tokenizer_files=files))


def test_a_description_past_a_bound_breaks_the_contract() -> None:
    with pytest.raises(ProtocolError, match="tokenizer_files: has 65 files; at most 64"):
        description_from_proto(pb.ModelDescription(role="draft", tokenizer_files=[pb.TokenizerFile()] * 65))


async def test_a_command_past_a_bound_fails_its_session_and_the_link_goes_on(serve: Serve) -> None:
    draft = DraftService.with_ngram(min_n=1, max_n=2)
    server = await serve("draft", draft)
    bad = opened(1)
    SAMPLING["logit_bias"](bad.sampling)
    tokens = (1, 2, 1, 2, 1)
    asked = [
        ports.Extend(session, 2, 0, EMPTY_PREFIX, tokens, 2 if session < 3 else MANY_DRAFTS) for session in (2, 3, 1)
    ]
    commands = [
        pb.DraftCommand(open=bad),
        pb.DraftCommand(open=opened(2)),
        pb.DraftCommand(open=opened(3)),
        *draft_commands_to_proto(asked).commands,
    ]

    async def sent() -> AsyncIterator[pb.DraftCommands]:
        yield pb.DraftCommands(commands=commands)
        await answered

    answered = asyncio.get_running_loop().create_future()
    found: dict[int, Any] = {}
    async with grpc.aio.insecure_channel(server.address, options=message_limits(MAX_LINK_MESSAGE_BYTES)) as channel:
        async for message in DraftServiceStub(channel).Attach(sent(), metadata=[VERSION]):
            for event in message.events:
                answer = getattr(event, event.WhichOneof("event"))
                if isinstance(answer, pb.StepAnswers):
                    found |= {each.session: each for each in proposals_from_proto(answer).events([0])}
                elif not isinstance(answer, pb.Opened):  # the answer to its item comes later
                    found[answer.session] = answer
            if len(found) == 3 and not answered.done():
                answered.set_result(None)
    await draft.close()
    assert (found[1].code, found[1].field) == ("InvalidRequestError", "logit_bias")
    assert found[1].message == "logit_bias: has 1025 entries; at most 1024"
    assert list(found[2].token_ids) == [2, 1]
    assert (found[3].code, found[3].field) == ("InvalidRequestError", "draft_length")


def test_delays_and_durations_of_a_peer_are_bounded() -> None:
    """A delay of 49 days would stop admission for all."""
    most = (1 << 32) - 1
    for event in (
        pb.TargetEvent(refused=pb.Refused(retry_after_ms=most)),
        pb.TargetEvent(preempted=pb.Preempted(retry_after_ms=most)),
    ):
        (read,) = target_events_from_proto(pb.TargetEvents(events=[event])).events
        assert isinstance(read, ports.Refused | ports.Preempted)
        assert read.retry_after_ms == limits.LONGEST_RETRY_DELAY_MS
    report = pb.ForwardReport(queue_ns=1 << 63, forward_ns=1 << 63, sample_ns=1 << 63, total_ns=1 << 63)
    found = target_events_from_proto(pb.TargetEvents(report=report)).report
    assert found is not None
    stages = {found.queue_ns, found.forward_ns, found.sample_ns, found.total_ns}
    assert stages == {limits.LONGEST_STAGE_NS}


def test_pages_of_a_peer_are_bounded() -> None:
    """The pages of all replicas are told to users in a field of 32 bits."""
    most = limits.LINK_PAGES.most
    assert description_from_proto(pb.ModelDescription(role="draft", num_pages=most)).num_pages == most
    with pytest.raises(ProtocolError, match="num_pages: has"):
        description_from_proto(pb.ModelDescription(role="draft", num_pages=most + 1))
