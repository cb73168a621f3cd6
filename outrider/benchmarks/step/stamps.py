"""Timeline of a step across processes: timestamps of each process, combined afterwards.

All processes run on one host and read one clock, so moments of different processes may be subtracted from each other.
Notes wrap the ports that are measured; nothing inside these knows of them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.batched import AnswerBatch, CommandBatch
from outrider.ports import EventBatch, Link
from outrider.stalls import Stall
from outrider.types import ModelDescription

SIDES = ("draft", "target")
ASKED, ARRIVED, BEGAN, ENDED, LEFT, RECEIVED = range(6)
"""Moments of one item, in order: the coordinator sends it, the service's event loop has it, its forward begins and
ends, its answer is on the event loop again, the coordinator has the answer."""
PARTS = ("there", "hand_in", "forward", "hand_out", "back")
"""Parts between the stamps: encoding, wire and decoding; the way to the engine's thread; the forward; the way back from
that thread; encoding, wire and decoding."""
TURN = "turn"
"""Time between an answer and what the coordinator asks next for that session."""

Key = tuple[str, int, int]
"""(side, session, generation)"""


class Stamps:
    """Moments of items, noted in one process."""

    def __init__(self) -> None:
        self._notes: list[tuple[str, int, int, int, int]] = []
        self._arrays: list[tuple[str, int, int, Any]] = []

    def note(self, side: str, what: int, items: Iterable[Any]) -> None:
        """Note the present moment for commands, arrays of them, the items of jobs, or events."""
        now = time.perf_counter_ns()
        for item in items:
            if isinstance(item, AnswerBatch | CommandBatch):
                self._arrays.append((side, what, now, item))
            else:
                self._notes.append((side, item.session, item.generation, what, now))

    def save(self, path: Path) -> None:
        """Save into a file that ``load`` reads."""
        for side, what, now, batched in self._arrays:
            heads = zip(batched.sessions.tolist(), batched.generations.tolist(), strict=True)
            self._notes += [(side, session, generation, what, now) for session, generation in heads]
        path.write_text(json.dumps(self._notes), encoding="utf-8")


class StampedPort:
    """A port whose links note when commands and events pass."""

    def __init__(self, port: Any, stamps: Stamps, side: str, *, is_remote: bool) -> None:  # noqa: ANN401 - either port
        """``is_remote``: as its coordinator sees it, not as its own process does."""
        self._port, self._stamps, self._side, self._is_remote = port, stamps, side, is_remote

    async def describe(self) -> ModelDescription:
        """Forwarded to the port."""
        description: ModelDescription = await self._port.describe()
        return description

    async def attach(self) -> StampedLink:
        """Forwarded to the port."""
        moments = (ASKED, RECEIVED) if self._is_remote else (ARRIVED, LEFT)
        return StampedLink(await self._port.attach(), self._stamps, self._side, moments)


class StampedLink:
    """A link of such a port."""

    def __init__(self, link: Link[Any, Any], stamps: Stamps, side: str, moments: tuple[int, int]) -> None:
        self._link, self._stamps, self._side = link, stamps, side
        self._at_send, self._at_event = moments

    @property
    def num_pages_free(self) -> int | None:
        """Forwarded to the link."""
        return self._link.num_pages_free

    @property
    def stall(self) -> Stall:
        """Forwarded to the link."""
        return self._link.stall

    def send(self, commands: Sequence[Any]) -> None:
        """Forwarded to the link."""
        self._stamps.note(self._side, self._at_send, commands)
        self._link.send(commands)

    async def events(self) -> AsyncIterator[EventBatch[Any]]:
        """Forwarded to the link."""
        async for batch in self._link.events():
            self._stamps.note(self._side, self._at_event, (*batch.events, *batch.batched))
            yield batch

    async def close(self) -> None:
        """Forwarded to the link."""
        await self._link.close()


class Moments:
    """The notes of all processes, put together."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._items: dict[Key, dict[int, int]] = defaultdict(dict)
        for path in paths:
            for side, session, generation, what, when in json.loads(path.read_text(encoding="utf-8")):
                self._items[side, session, generation][what] = when

    def parts(self, began_ns: int, ended_ns: int, *, num_skipped: int) -> dict[str, list[float]]:
        """Milliseconds by part, "draft_there" and so on, of items asked for between two moments.

        The first ``num_skipped`` of each session on each side are left out.
        """
        found: dict[str, list[float]] = {name: [] for name in part_names()}
        for items in self._by_session(began_ns, ended_ns).values():
            for side in SIDES:
                mine = [moments for its_side, moments in items if its_side == side]
                for moments in mine[num_skipped:]:
                    for part, (earlier, later) in zip(
                        PARTS, itertools.pairwise(range(ASKED, RECEIVED + 1)), strict=True
                    ):
                        found[f"{side}_{part}"].append(1e-6 * (moments[later] - moments[earlier]))
            for (side, moments), (_, following) in itertools.pairwise(items[2 * num_skipped :]):
                found[f"{side}_{TURN}"].append(1e-6 * (following[ASKED] - moments[RECEIVED]))
        return found

    def _by_session(self, began_ns: int, ended_ns: int) -> dict[int, list[tuple[str, dict[int, int]]]]:
        """Items whose every moment is known, in the order in which they were asked for."""
        sessions: dict[int, list[tuple[str, dict[int, int]]]] = defaultdict(list)
        for (side, session, _), moments in self._items.items():
            if len(moments) == RECEIVED + 1 and began_ns <= moments[ASKED] < ended_ns:
                sessions[session].append((side, moments))
        for items in sessions.values():
            items.sort(key=lambda item: item[1][ASKED])
        return sessions


def part_names() -> Iterator[str]:
    """Names of the parts of both sides, in the order of a step."""
    return (f"{side}_{part}" for side in SIDES for part in (*PARTS, TURN))
