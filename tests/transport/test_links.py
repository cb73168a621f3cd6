"""Links in process and over gRPC: the same scenario, equal events; and what happens when either end goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import ProtocolError, UnavailableError
from outrider.ports import (
    EventBatch,
    Extend,
    Open,
    Proposal,
    Refused,
    Release,
    Score,
    Scores,
    SessionFailed,
    SessionLost,
)
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.transport.convert.events import target_events_from_proto, target_events_to_proto
from outrider.transport.link.heartbeats import with_heartbeats
from outrider.transport.link.pump import LinkPump
from outrider.transport.link.versions import METADATA as VERSION
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.types import (
    JudgingRule,
    PeerAddress,
    SamplingParams,
    SparseEvidence,
    Support,
)
from tests.support.equality import same
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows, reversed_rows
from tests.support.tcp_proxy import TcpProxy
from tests.transport.conftest import Serve

V = 9
PROMPT = (1, 2, 3)
TARGET_ROWS = random_rows(V, seed=1)
DRAFT_ROWS = reversed_rows(TARGET_ROWS)


def opening(session: int, generation: int = 1, **more: Any) -> Open:
    fields: dict[str, Any] = {
        "session": session,
        "generation": generation,
        "sampling": SamplingParams(temperature=0.8, top_p=0.95, logit_bias=((2, 0.3),)),
        "seed": (1 << 64) - 5,
        "judging_rule": JudgingRule.REJECTION,
        "prompt_length": len(PROMPT),
        "max_length": 32,
        "num_token_ids": V,
    }
    return Open(**(fields | more))


OPENINGS: dict[str, dict[str, Any]] = {
    "rejection": {},
    "greedy": {"judging_rule": JudgingRule.GREEDY, "sampling": SamplingParams(temperature=0)},
    "coupled": {"judging_rule": JudgingRule.COUPLED},
    "typical": {"judging_rule": JudgingRule.TYPICAL},
    "logprobs": {"num_logprobs": 3, "num_prompt_logprobs": 2},
}


class Talk:
    """One link, spoken to in turn."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self._events = link.events()

    async def say(self, *commands: Any) -> EventBatch[Any]:
        self.link.send(commands)
        return await self.hear()

    async def hear(self) -> EventBatch[Any]:
        async with asyncio.timeout(240):
            batch: EventBatch[Any] = await anext(self._events)
            return EventBatch(batch.all_events(), batch.report)

    async def ended(self) -> bool:
        async with asyncio.timeout(240):
            return [batch async for batch in self._events] == []


async def draft_scenario(draft: Any) -> list[EventBatch[Any]]:
    talk = Talk(await draft.attach())
    heard = []
    for session, more in enumerate(OPENINGS.values()):
        talk.link.send([opening(session, **more)])
        heard.append(await talk.say(Extend(session, 2, 0, EMPTY_PREFIX, PROMPT, 3)))
        heard.append(await talk.say(Extend(session, 3, 3, prefix_hash(PROMPT), (4, 5), 2)))
    heard.append(await talk.say(Extend(0, 4, 3, (b"", 12345), (4,), 2), Extend(99, 1, 0, EMPTY_PREFIX, PROMPT, 1)))
    heard.append(await talk.say(Release(1, 9), opening(50, max_length=1 << 30)))
    await talk.link.close()
    assert await talk.ended()
    return heard


async def target_scenario(target: Any, proposals: Sequence[Proposal]) -> list[EventBatch[Any]]:
    talk = Talk(await target.attach())
    heard = []
    for session, (more, proposal) in enumerate(zip(OPENINGS.values(), proposals, strict=True)):
        talk.link.send([opening(session, **more)])
        evidence = proposal.evidence
        support = Support(evidence.counts, evidence.token_ids) if isinstance(evidence, SparseEvidence) else None
        heard.append(await talk.say(Score(session, 2, 0, EMPTY_PREFIX, PROMPT, proposal.token_ids, support)))
    heard.append(await talk.say(Score(0, 3, 0, EMPTY_PREFIX, (V,)), Score(1, 3, 0, EMPTY_PREFIX, ())))
    await talk.link.close()
    assert await talk.ended()
    return heard


async def test_one_scenario_in_process_and_over_grpc_gives_equal_events(serve: Serve) -> None:
    toys: list[Any] = [ToyDraft(DRAFT_ROWS, V, num_pages=200), ToyTarget(TARGET_ROWS, V, num_pages=200)]
    remote_toys: list[Any] = [ToyDraft(DRAFT_ROWS, V, num_pages=200), ToyTarget(TARGET_ROWS, V, num_pages=200)]
    remote_draft = RemoteDraft((await serve("draft", remote_toys[0])).address)
    remote_target = RemoteTarget((await serve("target", remote_toys[1])).address)
    # How tensors travel and whether a link falls silent is the wire's to say.
    for remote, toy in ((remote_draft, toys[0]), (remote_target, toys[1])):
        reached = replace(with_heartbeats(toy.description), peer_address=PeerAddress(remote.address))
        assert await remote.describe() == reached

    here, there = await draft_scenario(toys[0]), await draft_scenario(remote_draft)
    assert same(tuple(there), tuple(here))
    kinds = {type(event) for batch in here for event in batch.events}
    assert kinds == {Proposal, SessionLost, Refused}
    forms = {type(event.evidence) for batch in here for event in batch.events if isinstance(event, Proposal)}
    assert forms == {SparseEvidence, type(None)}

    proposals = [batch.events[0] for batch in here[: 2 * len(OPENINGS) : 2]]
    here, there = await target_scenario(toys[1], proposals), await target_scenario(remote_target, proposals)
    assert {type(event) for batch in here for event in batch.events} == {Scores, SessionFailed}
    # Logprobs are float32 on the wire, and the toys' are not.
    for one, other in zip(here[:-2], there[:-2], strict=True):
        assert same(one, other)
    assert same(here[-1], there[-1])
    one, other = here[-2].events[0], there[-2].events[0]
    assert same(one.form, other.form) and len(one.logprobs) == len(other.logprobs) > 0 < len(one.prompt_logprobs)
    for toy in (*toys, *remote_toys):
        assert toy.num_pages_free == 200


async def test_events_are_pushed_unasked(serve: Serve) -> None:
    draft = ToyDraft(DRAFT_ROWS, V)
    talk = Talk(await RemoteDraft((await serve("draft", draft)).address).attach())
    await talk.say(opening(1), Extend(1, 2, 0, EMPTY_PREFIX, PROMPT, 1))
    evidence = SparseEvidence(np.array([1], np.int32), np.array([4], np.int32), np.array([1.0], np.float32))
    pushed = Proposal(1, 2, 3, (4,), evidence)
    draft.link.push(pushed)
    assert same((await talk.hear()).events, (pushed,))
    await talk.link.close()


async def test_reading_goes_on_while_nothing_is_read_from_us(serve: Serve) -> None:
    """No side's reader waits for its writer: many messages go in while no answer is taken out."""
    target = ToyTarget(TARGET_ROWS, V)
    link = await RemoteTarget((await serve("target", target)).address).attach()
    link.send([opening(1)])
    for generation in range(2, 1002):
        link.send([Score(1, generation, 0, EMPTY_PREFIX, PROMPT)])
    async with asyncio.timeout(240):
        while not target.links or len(target.link.sent) < 1001:
            await asyncio.sleep(0.001)
    generations: list[int] = []
    talk = Talk(link)
    while len(generations) < 1000:
        generations += [event.generation for event in (await talk.hear()).events]
    assert generations == list(range(2, 1002))
    await link.close()


@pytest.mark.parametrize("way", ["close", "cancelled reader", "cut"])
async def test_however_a_link_ends_its_sessions_are_released(serve: Serve, way: str) -> None:
    draft = ToyDraft(DRAFT_ROWS, V, num_pages=8)
    server = await serve("draft", draft)
    async with TcpProxy(int(server.address.rpartition(":")[2])).running() as proxy:
        remote = RemoteDraft(proxy.address)
        talk = Talk(await remote.attach())
        await talk.say(opening(1), Extend(1, 2, 0, EMPTY_PREFIX, PROMPT, 1))
        assert draft.num_pages_free == 0
        if way == "close":
            await talk.link.close()
            assert draft.num_pages_free == 8  # released by the time it returns
            await talk.link.close()
        elif way == "cut":
            proxy.cut()
        else:
            reader = asyncio.create_task(talk.hear())
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await talk.link.close()
        async with asyncio.timeout(240):
            while draft.num_pages_free != 8:
                await asyncio.sleep(0.001)
    assert draft.link.is_closed


async def test_a_link_that_breaks_says_so_to_reader_and_sender(serve: Serve) -> None:
    target = ToyTarget(TARGET_ROWS, V)
    server = await serve("target", target)
    talk = Talk(await RemoteTarget(server.address).attach())
    await talk.say(opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT))
    target.break_links("the engine failed")
    with pytest.raises(UnavailableError, match="the engine failed"):
        await talk.hear()
    with pytest.raises(UnavailableError):
        talk.link.send([Release(1, 3)])
    await talk.link.close()


async def test_a_server_that_stops_breaks_its_links(serve: Serve) -> None:
    target = ToyTarget(TARGET_ROWS, V)
    server = await serve("target", target)
    talk = Talk(await RemoteTarget(server.address).attach())
    await talk.say(opening(1), Score(1, 2, 0, EMPTY_PREFIX, PROMPT))
    waiting = asyncio.create_task(talk.hear())
    await server.stop()
    with pytest.raises(UnavailableError, match=server.address):
        await waiting
    with pytest.raises(UnavailableError):
        talk.link.send([Release(1, 3)])
    await talk.link.close()


async def test_a_break_is_known_to_a_sender_while_nobody_reads(serve: Serve) -> None:
    server = await serve("target", ToyTarget(TARGET_ROWS, V))
    link = await RemoteTarget(server.address).attach()
    link.send([opening(1)])
    await server.stop()
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(240):
            while True:
                link.send([Release(1, 3)])
                await asyncio.sleep(0.001)
    await link.close()


async def test_sending_never_blocks_and_never_goes_on_for_ever(serve: Serve) -> None:
    """A peer that stopped reading costs a bounded queue, then the link."""
    link = await RemoteTarget((await serve("target", ToyTarget(TARGET_ROWS, V))).address).attach()
    with pytest.raises(UnavailableError):
        for generation in range(1_000_000):  # without a turn of the event loop nothing is written
            link.send([Release(1, generation)])
    async with asyncio.timeout(240):
        with pytest.raises(UnavailableError, match="stopped reading"):  # a lost command is a lost link
            await anext(aiter(link.events()))
    await link.close()
    with pytest.raises(UnavailableError):
        link.send([])


async def test_an_address_where_nobody_is() -> None:
    remote = RemoteTarget("127.0.0.1:1", connect_timeout_s=0.5)
    async with asyncio.timeout(240):
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await remote.describe()
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await remote.attach()


async def test_a_service_that_refuses_to_attach(serve: Serve) -> None:
    draft = ToyDraft(DRAFT_ROWS, V)
    draft.faults.unreachable = True
    remote = RemoteDraft((await serve("draft", draft)).address)
    with pytest.raises(UnavailableError, match="toy draft"):
        await remote.describe()
    with pytest.raises(UnavailableError, match="toy draft"):
        await Talk(await remote.attach()).hear()


async def test_the_wrong_kind_of_service_is_a_clear_error(serve: Serve) -> None:
    server = await serve("draft", ToyDraft(DRAFT_ROWS, V))
    with pytest.raises(ProtocolError, match=server.address):
        await RemoteTarget(server.address).describe()


async def test_a_message_that_cannot_be_read_ends_the_link_with_its_reason(serve: Serve) -> None:
    import grpc.aio

    from outrider.v1 import link_pb2
    from outrider.v1.link_pb2_grpc import DraftServiceStub

    draft = ToyDraft(DRAFT_ROWS, V)
    server = await serve("draft", draft)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = DraftServiceStub(channel).Attach(metadata=[VERSION])
        await call.write(link_pb2.DraftCommands(commands=[link_pb2.DraftCommand()]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(240):
                await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "DraftCommand" in (caught.value.details() or "")
    assert draft.link.is_closed


async def test_over_a_unix_socket(serve: Serve, tmp_path: Any) -> None:
    draft = ToyDraft(DRAFT_ROWS, V)
    server = await serve("draft", draft, host=f"unix:{tmp_path / 'draft.sock'}")
    assert server.address == f"unix:{tmp_path / 'draft.sock'}"
    talk = Talk(await RemoteDraft(server.address).attach())
    batch = await talk.say(opening(1), Extend(1, 2, 0, EMPTY_PREFIX, PROMPT, 1))
    assert isinstance(batch.events[0], Proposal)
    await talk.link.close()


async def test_an_answer_longer_than_a_message_ends_its_session_on_both_ends_and_no_other() -> None:
    target = ToyTarget(TARGET_ROWS, V, num_pages=200)
    requests: asyncio.Queue[Any] = asyncio.Queue()

    async def incoming() -> AsyncIterator[Any]:
        while True:
            yield await requests.get()

    pump = LinkPump(
        await target.attach(),
        target_commands_from_proto,
        target_events_to_proto,
        max_message_bytes=1_500,
    )
    openings = [
        opening(session, num_token_ids=V, num_logprobs=num_logprobs) for session, num_logprobs in enumerate((0, V, 0))
    ]
    scores = [Score(session, 2, 0, EMPTY_PREFIX, PROMPT, (4, 5) * 4) for session in range(3)]
    requests.put_nowait(target_commands_to_proto([*openings, *scores]))
    events: list[Any] = []
    messages = pump.run(incoming())
    async with asyncio.timeout(240):
        while len(events) < 3:
            events += target_events_from_proto(await anext(messages)).all_events()
    by_session = {event.session: event for event in events}
    assert isinstance(by_session[1], SessionFailed)
    assert isinstance(by_session[0], Scores) and isinstance(by_session[2], Scores)
    assert set(target.link.core.sessions) == {0, 2}
    await messages.aclose()
    assert target.num_pages_free == 200
