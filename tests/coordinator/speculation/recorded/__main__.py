"""Record what a controller hears of the embedded pair on this machine:

    python -m tests.coordinator.speculation.recorded FILE

One user, then four, then one again, in one process; a line of JSON an event, times in microseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from outrider.demo import DRAFT, TARGET
from outrider.ports import ForwardReport
from outrider_coordinator.speculation import ControlledSession, DraftLengthController
from outrider_coordinator.speculation.rounds import seconds_of
from outrider_coordinator.speculation.sessions import SessionVerdict
from tests.support.stack import Stack, run_stack

EVENTS = ("enter", "leave", "begin", "note_draft")


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
    add_verdict, add_end = DraftLengthController.add_verdict, DraftLengthController.add_end

    def heard_verdict(self: DraftLengthController, verdict: SessionVerdict) -> None:
        into.append(["note_verdict", *map(plain, verdict)])
        add_verdict(self, verdict)

    def heard_end(self: DraftLengthController, report: ForwardReport | None) -> None:
        into.append(["end", *([0, 0, 0] if report is None else _figures(report))])
        add_end(self, report)

    setattr(DraftLengthController, "add_verdict", heard_verdict)  # noqa: B010
    setattr(DraftLengthController, "add_end", heard_end)  # noqa: B010


def _figures(report: ForwardReport) -> list[int]:
    return [report.batch_size, report.num_tokens, round(1e6 * seconds_of(report))]


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
