"""Record what a controller hears of the embedded pair on this machine:

    python -m tests.coordinator.speculation.recorded FILE

One user, then four, then one again, in one process; a line of JSON an event, times in microseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.demo import DRAFT, TARGET
from outrider_coordinator.speculation import ControlledSession, DraftLengthController
from outrider_coordinator.speculation.sessions import SessionVerdict
from tests.support.stack import Stack, run_stack

EVENTS = ("enter", "leave", "begin", "end", "note_draft")


def listen(into: list[list[Any]]) -> None:
    """Every event of every controller, as it is heard."""
    numbers: dict[int, int] = {}

    def plain(value: object) -> object:
        if isinstance(value, ControlledSession):
            return numbers.setdefault(id(value), len(numbers))
        return round(1e6 * value) if isinstance(value, float) else value

    for name in EVENTS:
        method = getattr(DraftLengthController, name)

        def heard(
            self: DraftLengthController, *arguments: Any, _name: str = name, _method: Any = method, **named: Any
        ) -> Any:
            into.append([_name, *map(plain, arguments), *map(plain, named.values())])
            return _method(self, *arguments, **named)

        setattr(DraftLengthController, name, heard)
    note_verdicts = DraftLengthController.note_verdicts

    def heard_verdicts(self: DraftLengthController, verdicts: Iterable[SessionVerdict]) -> None:
        verdicts = list(verdicts)
        into.extend(["note_verdict", *map(plain, verdict)] for verdict in verdicts)
        note_verdicts(self, verdicts)

    setattr(DraftLengthController, "note_verdicts", heard_verdicts)  # noqa: B010


async def record(into: list[list[Any]]) -> None:
    listen(into)
    async with run_stack(TARGET, DRAFT, wire=False, draft_length="auto", num_speculative_tokens=8) as stack:
        for num_users in (1, 4, 1):
            await asyncio.gather(*(_ask(stack, user) for user in range(num_users)))


async def _ask(stack: Stack, user: int) -> None:
    await stack.generate(
        prompt=f"def read_{user}(path):\n", max_tokens=160, temperature=0, ignore_eos=True, request_id=str(user)
    )


if __name__ == "__main__":
    events: list[list[Any]] = []
    asyncio.run(record(events))
    Path(sys.argv[1]).write_text("\n".join(map(json.dumps, events)) + "\n", encoding="utf-8")
