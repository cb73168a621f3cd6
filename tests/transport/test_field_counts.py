"""Field counts: a message of millions of entries is refused before it is parsed, all others are left to the parser."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.limits import LINK_COMMANDS, LINK_FIELDS, REQUEST_FIELDS
from outrider.transport import field_counts
from outrider.transport.field_counts import check_num_fields, counting_fields, read_varint
from outrider.transport.link.versions import METADATA as VERSION
from outrider.transport.malformed import Unchecked
from outrider.transport.remote import RemoteDraft
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import link_pb2
from tests.support.examples import SAME_EACH_TIME
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.transport.conftest import Serve

REQUEST = pb.GenerateRequest.DESCRIPTOR
MANY = 400_000


def nested(tag: int, content: bytes) -> bytes:
    length, rest = b"", len(content)
    while rest > 0x7F:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return bytes([tag]) + length + bytes([rest]) + content


FLOODS = {
    "stop": b"\x3a\x00" * MANY,
    "bad_words": nested(0x22, b"\x52\x00" * MANY),
    "logit_bias": nested(0x22, b"\x4a\x00" * MANY),
    "sampling": b"\x22\x00" * MANY,
    "stop_token_ids": b"\x40\x05" * MANY,
    "request": b"\xf8\x07\x01" * MANY,  # a field that is not known
}


@pytest.mark.parametrize("field", FLOODS)
def test_a_flood_of_one_field_is_named(field: str) -> None:
    pb.GenerateRequest.FromString(FLOODS[field])  # it is well formed
    with pytest.raises(InvalidRequestError, match="or more, one by one; at most") as caught:
        check_num_fields(FLOODS[field], REQUEST)
    assert caught.value.field == field


@pytest.mark.parametrize("begin", [b"", b"\x10", b"\x22", nested(0x22, b"\xff" * 100)])
def test_a_number_that_does_not_end_is_left_to_the_parser_at_once(begin: bytes) -> None:
    endless = begin + b"\xff" * (8 << 20)  # its sum would take hours
    check_num_fields(endless, REQUEST)
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(endless)
    assert read_varint(b"\xff" * 9 + b"\x01", 0) == ((1 << 64) - 1, 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_varint(b"\xff" * 10 + b"\x01", 0)


def test_a_flood_behind_a_group_is_seen() -> None:
    flood = b"\xfb\x07" + b"\xfc\x07" + b"\x3a\x00" * MANY
    pb.GenerateRequest.FromString(flood)
    with pytest.raises(InvalidRequestError, match="stop"):
        check_num_fields(flood, REQUEST)


def test_what_is_long_and_not_many_passes() -> None:
    message = pb.GenerateRequest(stop_token_ids=range(1024), stop=["s" * 4096] * 64, bad_words=["w" * 64] * 1024)
    message.prompt_token_ids.token_ids.extend([70_000] * 1_000_000)
    message.sampling.allowed_token_ids.extend(range(1 << 20))
    for token_id in range(1024):
        message.sampling.logit_bias.add(token_id=token_id, bias=1.0)
    check_num_fields(message.SerializeToString(), REQUEST)
    check_num_fields(pb.GenerateRequest(prompt_text="\x3a\x00" * 3_000_000).SerializeToString(), REQUEST)


@SAME_EACH_TIME
@given(st.binary(max_size=60))
@example(b"\x22\xff")
@example(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x22\xff\xff\xff\xff\x0f\x52")
def test_nothing_but_the_number_of_fields_is_refused(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(field_counts, "FEWEST_BYTES", 0)
        check_num_fields(data, REQUEST)  # far fewer fields than there may be: garbage is for the parser to refuse


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_a_flood_is_an_invalid_argument_on_the_wire(serve: Serve, method: str) -> None:
    server = await serve("generation", ScriptedGenerator())
    async with grpc.aio.insecure_channel(server.address) as channel:
        asking: Any = channel.unary_stream(f"/outrider.v1.GenerationService/{method}")
        call = asking(FLOODS["bad_words"])
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await call.details()).startswith("bad_words: has ")


@pytest.mark.parametrize("method", ["GetModelInfo", "GetTokenizer"])
@pytest.mark.parametrize("flood", [FLOODS["stop"], nested(0x0A, b"a" * 8_000_000)], ids=["fields", "text"])
async def test_a_flood_of_a_method_without_a_prompt_names_none(serve: Serve, method: str, flood: bytes) -> None:
    server = await serve("generation", ScriptedGenerator())
    async with grpc.aio.insecure_channel(server.address) as channel:
        asking: Any = channel.unary_unary(f"/outrider.v1.GenerationService/{method}")
        call = asking(flood)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == f"message: has {len(flood)} bytes; at most 4096"
        assert await asking(nested(0x7A, b"a" * 4000)) is not None, "of a newer client"


def test_the_bound_is_past_what_a_whole_request_holds() -> None:
    assert REQUEST_FIELDS.most >= 2 * (3 * 1024 + 2 * 1024 + 64 + 1024)  # an entry of logit_bias is three fields


LINK_FLOODS = {
    "target": link_pb2.TargetCommands.DESCRIPTOR,
    "draft": link_pb2.DraftCommands.DESCRIPTOR,
}


def a_command_of_many_fields(count: int) -> bytes:
    return nested(0x0A, nested(0x0A, nested(0x1A, b"\x52\x00" * count)))


def steps_until_refused(flood: bytes, message: Any) -> tuple[int, str]:
    """Slices until a link's message is refused, and what its error says; a slice counts some thousand fields."""
    work, num_steps = counting_fields(flood, message, LINK_FIELDS, LINK_COMMANDS), 0
    try:
        while True:
            next(work)
            num_steps += 1
    except StopIteration:
        return num_steps, ""
    except InvalidRequestError as error:
        return num_steps, str(error)


@pytest.mark.parametrize("role", LINK_FLOODS)
def test_a_link_message_of_very_many_items_is_refused_after_few_of_them(role: str) -> None:
    num_steps, error = steps_until_refused(b"\x0a\x00" * 10_000_000, LINK_FLOODS[role])
    assert error == "commands: has 16401 items or more; at most 16384"
    assert num_steps <= 9, "the other ten million are not looked at"


def test_a_link_message_of_very_many_fields_is_counted_in_slices_and_refused() -> None:
    num_steps, error = steps_until_refused(a_command_of_many_fields(1_200_000), LINK_FLOODS["target"])
    assert error == "bad_words: has 1048574 entries or more, one by one; at most 1024"
    assert num_steps == LINK_FIELDS.most // 8192
    num_steps, error = steps_until_refused(a_command_of_many_fields(LINK_FIELDS.most - 3), LINK_FLOODS["target"])
    assert error == ""


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_flooded_link_ends_with_invalid_argument(serve: Serve, role: str) -> None:
    toy = ToyDraft(random_rows(9, seed=1), 9) if role == "draft" else ToyTarget(random_rows(9, seed=1), 9)
    server = await serve(role, toy)
    service = link_pb2.DESCRIPTOR.services_by_name[f"{role.capitalize()}Service"].full_name

    async def flood() -> AsyncIterator[bytes]:
        yield b"\x0a\x00" * 10_000_000

    async with grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        attach: Any = channel.stream_stream(f"/{service}/Attach")
        call = attach(flood(), metadata=[VERSION])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(240):
                async for _ in call:
                    pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "commands: has 16401 items or more" in str(caught.value.details())


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("is_many", [True, False], ids=["items", "garbage"])
async def test_a_refused_link_message_is_not_kept(serve: Serve, role: str, is_many: bool) -> None:
    """Memory is freed without the collector of cycles, which runs after many objects: this is one of many megabytes."""
    toy = ToyDraft(random_rows(9, seed=1), 9) if role == "draft" else ToyTarget(random_rows(9, seed=1), 9)
    server = await serve(role, toy)
    service = link_pb2.DESCRIPTOR.services_by_name[f"{role.capitalize()}Service"].full_name

    async def flood() -> AsyncIterator[bytes]:
        yield b"\x0a\x00" * 1_100_000 if is_many else b"\xff" * 2_200_000

    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            attach: Any = channel.stream_stream(f"/{service}/Attach")
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                async with asyncio.timeout(240):
                    async for _ in attach(flood(), metadata=[VERSION]):
                        pass
        async with asyncio.timeout(240):  # the server may end its call after the client
            while any(isinstance(found, Unchecked) for found in gc.get_objects()):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_service_that_floods_its_coordinator_loses_the_link() -> None:
    async def attach(request_iterator: Any, context: Any) -> Any:
        yield b"\x0a\x00" * (LINK_FIELDS.most + 1)

    handler = grpc.method_handlers_generic_handler(
        "outrider.v1.DraftService", {"Attach": grpc.stream_stream_rpc_method_handler(attach)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = await RemoteDraft(f"127.0.0.1:{port}").attach()
    with pytest.raises(UnavailableError, match="broke the contract of the link: events: has 65553 items or more"):
        async with asyncio.timeout(240):
            await anext(link.events())
    await link.close()
    await server.stop(None)


NUM_IDS = 1_500_000
PACKED = {
    "stop_token_ids": nested(0x42, b"\x05" * NUM_IDS),
    "resume.emitted_token_ids": nested(0xAA, b"")[:1] + b"\x01" + nested(0x0A, nested(0x0A, b"\x05" * NUM_IDS))[1:],
    "allowed_token_ids": nested(0x22, nested(0x5A, b"\x05" * NUM_IDS)),
    "bad_words": nested(0x22, nested(0x52, nested(0x0A, b"\x05" * NUM_IDS))),
    "prompt_token_ids": nested(0x12, nested(0x0A, b"\x05" * NUM_IDS)),
    "request_id": nested(0x7A, b"a" * NUM_IDS),
    "stop": nested(0x3A, b"a" * NUM_IDS),
}


@pytest.mark.parametrize("field", PACKED)
def test_what_one_field_holds_is_refused_before_it_is_parsed(field: str) -> None:
    pb.GenerateRequest.FromString(PACKED[field])  # it is well formed
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        check_num_fields(PACKED[field], REQUEST)
    assert caught.value.field == field


def test_ids_in_several_packed_runs_are_added_up() -> None:
    runs = nested(0x42, b"\x05" * 1000) * 40
    with pytest.raises(InvalidRequestError, match="has 2000 ids; at most 1024"):
        check_num_fields(runs, REQUEST)


def test_as_many_ids_and_characters_as_are_allowed_pass() -> None:
    sampling = {"allowed_token_ids": range(1 << 17)}
    ids = pb.GenerateRequest(
        stop_token_ids=range(1024), sampling=sampling, prompt_token_ids={"token_ids": range(10**5)}
    )
    check_num_fields(ids.SerializeToString(), REQUEST)
    texts = pb.GenerateRequest(prompt_text="\N{GRINNING FACE}" * 500_000, stop=["\N{GRINNING FACE}" * 4096])
    check_num_fields(texts.SerializeToString(), REQUEST)
