"""Waits of an engine for its device: busy polling, or sleeping and polling on a single processor."""

from __future__ import annotations

import os
import sys
from typing import cast

import pytest
import torch

from outrider.kernels.device_stream import mark_reached, to_host, wait_for


class _Event:
    """Reached when it was looked at often enough."""

    def __init__(self, looks: int) -> None:
        self.looks_left = looks
        self.was_synchronized = False

    def query(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def synchronize(self) -> None:
        self.was_synchronized = True


@pytest.mark.skipif(sys.platform != "linux", reason="processors are counted on Linux alone")
@pytest.mark.parametrize(("processors", "spins"), [({3}, False), ({3, 4}, True)])
def test_it_spins_only_where_there_are_several_processors(
    monkeypatch: pytest.MonkeyPatch, processors: set[int], *, spins: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    event = _Event(looks=3)
    wait_for(cast(torch.cuda.Event, event))
    assert event.was_synchronized is spins
    assert (event.looks_left < 0) is not spins


def test_a_cpu_has_done_what_it_was_given() -> None:
    mark_reached(torch.device("cpu"))()


def test_what_is_read_on_the_host_of_a_cpu_is_the_tensor_itself() -> None:
    found = torch.arange(3)
    assert to_host(found) is found
