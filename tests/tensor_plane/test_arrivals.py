"""Arrivals: a reader goes on as soon as the card says that the bytes came, and never with those that were given up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outrider.errors import StaleReferenceError
from outrider.tensor_plane.arrivals import ArrivedTensors


class Card:
    """Events are the names of transfers here."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.asked = threading.Event()

    def has_ended(self, event: Any) -> bool:
        self.asked.set()
        return event in self.ended


def no_trouble() -> None:
    """Nothing is wrong."""


def transfer(name: str) -> Any:
    return name


def test_a_reader_goes_on_before_the_receiving_thread_has_heard() -> None:
    card = Card()
    arrivals = ArrivedTensors(card.has_ended)
    arrivals.note_queued([1, 2], transfer("first"))
    card.ended.add("first")
    arrivals.wait(1, 60.0, no_trouble)
    arrivals.drop([1])
    arrivals.note_arrived([1, 2])
    arrivals.wait(2, 60.0, no_trouble)
    with pytest.raises(StaleReferenceError, match=r"did not arrive within 0\.01 s"):
        arrivals.wait(1, 0.01, no_trouble)  # which was read, and is not kept


def test_what_the_card_has_not_received_is_waited_for() -> None:
    card = Card()
    arrivals = ArrivedTensors(card.has_ended)
    arrivals.note_queued([1], transfer("slow"))
    has_come = threading.Event()

    def read() -> None:
        arrivals.wait(1, 60.0, no_trouble)
        has_come.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert card.asked.wait(60.0)
    assert not has_come.is_set()
    arrivals.note_arrived([1])
    assert has_come.wait(60.0)
    reader.join(60.0)


def test_trouble_ends_a_wait() -> None:
    arrivals, troubles = ArrivedTensors(), iter([None, "the plane is closed"])
    errors: list[StaleReferenceError] = []
    is_waiting = threading.Event()

    def trouble() -> str | None:
        is_waiting.set()
        return next(troubles)

    def read() -> None:
        with pytest.raises(StaleReferenceError) as error:
            arrivals.wait(1, 60.0, trouble)
        errors.append(error.value)

    reader = threading.Thread(target=read)
    reader.start()
    assert is_waiting.wait(60.0)
    arrivals.wake()
    reader.join(60.0)
    assert "the plane is closed" in str(errors[0])


def test_what_lies_below_the_floor_is_not_kept() -> None:
    card = Card()
    arrivals = ArrivedTensors(card.has_ended)
    arrivals.note_queued([1, 2], transfer("both"))
    arrivals.raise_floor(2)
    card.ended.add("both")
    arrivals.wait(2, 60.0, no_trouble)
    with pytest.raises(StaleReferenceError, match="did not arrive"):
        arrivals.wait(1, 0.01, no_trouble)
