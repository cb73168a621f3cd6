"""The buffer between target and draft: what it keeps of what comes, and what it brings."""

from __future__ import annotations

import random

from outrider.types import HiddenStates
from outrider_coordinator.session.hidden_states import HiddenStateBuffer


def states(start: int, end: int, *, width: int = 1) -> HiddenStates:
    """Each value is its position, in one byte a row."""
    rows = end - start
    return HiddenStates(start, rows, width, "float32", bytes(range(start, end)))


def test_only_what_goes_on_is_kept() -> None:
    buffer = HiddenStateBuffer()
    buffer.put(states(0, 5), 3)
    buffer.put(states(5, 8), 8)  # leaves a gap
    assert (buffer.start, buffer.end) == (0, 3)
    buffer.put(states(1, 6), 6)  # overlaps
    assert buffer.first_part() == states(0, 6)
    buffer.put(states(6, 7, width=2), 7)  # of other layers
    assert buffer.end == 6


def test_what_the_draft_holds_is_forgotten() -> None:
    buffer = HiddenStateBuffer()
    for start in range(0, 9, 3):
        buffer.put(states(start, start + 3), 9)
    buffer.move_to(4)
    assert buffer.first_part() == states(4, 9)
    buffer.move_to(2)  # it lost some
    assert (buffer.start, buffer.end, buffer.first_part()) == (2, 2, None)
    buffer.put(states(2, 4), 4)
    buffer.move_to(7)  # it holds more than has come
    assert (buffer.start, buffer.end) == (7, 7)


def test_long_texts_go_in_parts() -> None:
    buffer = HiddenStateBuffer()
    for start in range(0, 12, 4):
        buffer.put(states(start, start + 4), 12)
    assert buffer.first_part(max_bytes=9) == states(0, 8)
    assert buffer.first_part(max_bytes=1) == states(0, 4)


def test_it_is_a_run_of_positions_whatever_comes() -> None:
    generator = random.Random(3)
    buffer = HiddenStateBuffer()
    for _ in range(3000):
        start = max(0, buffer.end + generator.randint(-3, 2))
        if generator.random() < 0.6 and start < 200:
            end = start + generator.randint(0, 6)
            buffer.put(states(start, end), end - generator.randint(0, 2))
        else:
            buffer.move_to(generator.randint(0, 190) if generator.random() < 0.1 else max(0, buffer.end - 2))
        part = buffer.first_part()
        assert (part is None) == (buffer.num_rows == 0)
        assert part is None or part == states(buffer.start, buffer.end)
