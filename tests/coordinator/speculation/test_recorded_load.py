"""A controller that hears again what one heard of the embedded pair on a CPU: users 1, 4 and 1."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider_coordinator.speculation import ControlledSession, DraftLengthController, Mode
from tests.coordinator.speculation.simulated_load import report_of

RECORDED = Path(__file__).parent / "recorded" / "embedded_pair.jsonl"
MICROSECONDS = 1e-6


class Replay:
    """One controller, and what it said on the way."""

    def __init__(self) -> None:
        self.controller = DraftLengthController()
        self.modes: list[Mode] = []
        self._sessions: defaultdict[int, ControlledSession] = defaultdict(lambda: ControlledSession(8))

    def hear(self, event: list[Any]) -> None:
        name, *values = event
        controller = self.controller
        if name in ("enter", "leave"):
            getattr(controller, name)(self._sessions[values[0]])
        elif name == "begin":
            controller.begin(MICROSECONDS * values[0])
        elif name == "note_verdict":
            session, num_drafted, num_accepted, lag = values
            controller.add_verdict((self._sessions[session], num_drafted, num_accepted, lag))
        elif name == "note_draft":
            controller.note_draft(max(1, values[1] // max(values[0], 1)), values[0], MICROSECONDS * values[2])
        else:
            self._end(*values)

    def _end(self, rows: int, tokens: int, microseconds: int) -> None:
        self.controller.add_end(report_of(rows, tokens, 1e-3 * microseconds))
        self.controller.learn()
        self.controller.choose()
        self.modes.append(self.controller.mode)


def events() -> Iterator[list[Any]]:
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def test_a_recorded_run_is_judged_as_it_was() -> None:
    replay = Replay()
    for event in events():
        replay.hear(event)
    assert replay.modes[-1] is Mode.SPECULATIVE
    assert replay.modes.count(Mode.SPECULATIVE) > 0.8 * len(replay.modes)
    assert replay.controller.expectation.rates[Mode.SPECULATIVE] > replay.controller.expectation.rates[Mode.PLAIN]
    assert 0.5 < replay.controller.acceptance.mean < 0.95
    assert (len(replay.controller.sessions), replay.controller.sessions.has_prompts) == (0, False)


def test_a_recorded_run_gives_the_same_choices_again() -> None:
    first, second = Replay(), Replay()
    for event in events():
        first.hear(event)
        second.hear(event)
    assert first.modes == second.modes
    assert first.controller.expectation.rates == second.controller.expectation.rates
