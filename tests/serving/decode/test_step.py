"""Decode batch: its keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.serving.decode.sessions import RunningSessions
from outrider.serving.decode.step import DecodeBatch


class CountingSession:
    """A session that counts how often its key is read."""

    def __init__(self, number: int) -> None:
        self._number, self.num_reads = number, 0

    @property
    def key(self) -> tuple[int, int]:
        self.num_reads += 1
        return 0, self._number


def test_keys_are_made_once_however_many_commands_look_for_theirs() -> None:
    sessions, ints = [CountingSession(number) for number in (3, 1, 2)], np.zeros(3, dtype=np.int64)
    columns: Any = None
    own = RunningSessions(sessions, None, np.zeros(3))  # type: ignore[arg-type]
    step = DecodeBatch(0, columns, own, ints, ints, ints, 0)
    assert [(0, number) in step.keys for number in (1, 4)] == [True, False]
    assert list(step.keys) == [(0, 3), (0, 1), (0, 2)]
    assert [session.num_reads for session in sessions] == [1, 1, 1]
