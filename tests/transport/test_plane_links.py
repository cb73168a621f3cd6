"""Large tensors and long batches on real links: equal events by either plane, and what happens when one is not there.

The toys' rows are small, so what counts as large is made small too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UnavailableError
from outrider.ports import EventBatch, Score, Scores, SessionFailed
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.tensor_plane import shared_file
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.transport.convert.events import target_events_from_proto, target_events_to_proto
from outrider.transport.link import pump as pump_module
from outrider.transport.planes import writer
from outrider.transport.planes.reader import SharedReader
from outrider.transport.planes.writer import SharedWriter
from outrider.transport.remote import RemoteTarget
from outrider.types import DenseScores, JudgingRule
from tests.support.equality import same
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.conftest import Serve
from tests.transport.test_links import Talk, opening

V = 50
ROWS = random_rows(V, seed=3)
PROMPT = (1, 2, 3)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SharedWriter]:
    """Shared memory in a folder of the test's own; every writer made."""
    made: list[SharedWriter] = []
    open_in = SharedReader.open

    def make() -> SharedWriter:
        made.append(SharedWriter(folder=tmp_path))
        return made[-1]

    monkeypatch.setattr(writer, "MIN_TENSOR_BYTES", 1)
    monkeypatch.setattr(pump_module, "SharedWriter", make)
    monkeypatch.setattr(SharedReader, "open", lambda name: open_in(name, folder=tmp_path))
    return made


async def dense_scores(target: Any, *, rounds: int = 6) -> list[EventBatch[Any]]:
    """One after the other, each held until the end."""
    talk = Talk(await target.attach())
    talk.link.send([opening(0, judging_rule=JudgingRule.DENSE_REJECTION, num_token_ids=V)])
    heard = [await talk.say(Score(0, 2 + index, 0, EMPTY_PREFIX, PROMPT, (4, 5, index))) for index in range(rounds)]
    await talk.link.close()
    return heard


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


async def test_events_are_equal_by_either_plane(serve: Serve, writers: list[SharedWriter], tmp_path: Path) -> None:
    here = await dense_scores(ToyTarget(ROWS, V))
    server = await serve("target", ToyTarget(ROWS, V))
    inline = await dense_scores(RemoteTarget(server.address, shares_memory=False))
    assert writers == []
    shared = await dense_scores(RemoteTarget(server.address))
    [used] = writers
    assert used.num_written > 0, "nothing went through shared memory"
    assert isinstance(here[0].events[0].form, DenseScores)
    assert same(tuple(inline), tuple(shared))
    assert same(tuple(batch.events for batch in here), tuple(batch.events for batch in shared))
    assert list(tmp_path.iterdir()) == []


async def test_the_link_says_which_plane_it_has(serve: Serve, writers: list[SharedWriter]) -> None:
    server = await serve("target", ToyTarget(ROWS, V))
    for shares_memory, plane in ((True, "shared_memory"), (False, "inline")):
        link: Any = await RemoteTarget(server.address, shares_memory=shares_memory).attach()
        talk = Talk(link)
        await talk.say(opening(0), Score(0, 2, 0, EMPTY_PREFIX, PROMPT))
        assert link.tensor_plane == plane
        await link.close()


async def test_a_link_that_broke_holds_no_file_of_its_plane(
    serve: Serve, writers: list[SharedWriter], tmp_path: Path
) -> None:
    """File is closed without the collector, which runs rarely: a coordinator whose links break often would run out of
    files.
    """
    server = await serve("target", ToyTarget(ROWS, V))
    gc.collect()
    gc.disable()
    others = _held()  # by earlier tests of this process
    try:
        for _ in range(3):
            link: Any = await RemoteTarget(server.address).attach()
            reading = asyncio.create_task(_until_broken(link))
            await eventually(partial(_has_plane, link))
            link._give_up("as a silent service is given up")
            await reading
            await link.close()
            await eventually(lambda: _held() <= others)
    finally:
        gc.enable()


def _has_plane(link: Any) -> bool:
    return bool(link.tensor_plane == "shared_memory")


async def _until_broken(link: Any) -> None:
    with pytest.raises(UnavailableError):
        async for _ in link.events():
            pass


def _open_files() -> list[str]:
    """Open files of this process, which plays both ends; the service closes its own when the link has ended."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return found


def _held() -> set[str]:
    return {path for path in _open_files() if "/outrider-" in path and "tokens" not in path}


async def test_a_host_that_cannot_see_the_file_gets_its_tensors_inline(
    serve: Serve, writers: list[SharedWriter], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SharedReader, "open", lambda name: None)
    server = await serve("target", ToyTarget(ROWS, V))
    elsewhere = await dense_scores(RemoteTarget(server.address))
    here = await dense_scores(ToyTarget(ROWS, V))
    assert same(tuple(batch.events for batch in here), tuple(batch.events for batch in elsewhere))
    [declined] = writers
    assert not declined.is_confirmed
    assert list(tmp_path.iterdir()) == []


async def test_a_reader_that_keeps_everything_is_not_written_over(
    serve: Serve, writers: list[SharedWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GROWTH_BYTES", 4096)
    server = await serve("target", ToyTarget(ROWS, V))
    remote = RemoteTarget(server.address)
    talk = Talk(await remote.attach())
    await talk.say(
        opening(0, judging_rule=JudgingRule.DENSE_REJECTION, num_token_ids=V), Score(0, 2, 0, EMPTY_PREFIX, PROMPT)
    )
    [end] = writers
    end._max_bytes = shared_file.HEADER_BYTES + 4 * 4096
    held = [await talk.say(Score(0, 3 + index, 0, EMPTY_PREFIX, PROMPT, (index,))) for index in range(9)]
    assert end.num_in_use <= 5 < len(held)
    expected = await dense_scores_of_one(ToyTarget(ROWS, V), 9)
    assert same(tuple(batch.events for batch in held), tuple(batch.events for batch in expected))
    del held
    await eventually(lambda: end.num_in_use == 0)
    await talk.link.close()


async def dense_scores_of_one(target: Any, rounds: int) -> list[EventBatch[Any]]:
    talk = Talk(await target.attach())
    await talk.say(
        opening(0, judging_rule=JudgingRule.DENSE_REJECTION, num_token_ids=V), Score(0, 2, 0, EMPTY_PREFIX, PROMPT)
    )
    return [await talk.say(Score(0, 3 + index, 0, EMPTY_PREFIX, PROMPT, (index,))) for index in range(rounds)]


async def test_an_answer_longer_than_a_message_ends_its_session_on_both_ends_and_no_other() -> None:
    target = ToyTarget(ROWS, V, num_pages=200)
    requests: asyncio.Queue[Any] = asyncio.Queue()

    async def incoming() -> AsyncIterator[Any]:
        while True:
            yield await requests.get()

    pump = pump_module.LinkPump(
        await target.attach(),
        target_commands_from_proto,
        target_events_to_proto,
        offer=lambda name: None,
        shares_memory=False,
        max_message_bytes=1_800,
    )
    rules = (JudgingRule.REJECTION, JudgingRule.DENSE_REJECTION, JudgingRule.REJECTION)
    openings = [opening(session, judging_rule=rule, num_token_ids=V) for session, rule in enumerate(rules)]
    scores = [Score(session, 2, 0, EMPTY_PREFIX, PROMPT, (4, 5) * 4) for session in range(3)]
    requests.put_nowait(target_commands_to_proto([*openings, *scores]))
    events: list[Any] = []
    messages = pump.run(incoming())
    async with asyncio.timeout(20):
        while len(events) < 3:
            events += target_events_from_proto(await anext(messages)).all_events()
    by_session = {event.session: event for event in events}
    assert isinstance(by_session[1], SessionFailed)
    assert isinstance(by_session[0], Scores) and isinstance(by_session[2], Scores)
    assert set(target.link.core.sessions) == {0, 2}
    await messages.aclose()
    assert target.num_pages_free == 200
