"""Handover of a forward's hidden states: what a plane has room for goes by it, and the rest inline."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.planes import PlaneReference
from outrider.types import HiddenStates
from outrider_target.layer_states import StateHandover

WIDTH = 4


class RoomForRows:
    """``TargetPlanes`` with one writer, which takes so many rows at a time and so many in all."""

    def __init__(self, at_a_time: int, in_all: int) -> None:
        self.at_a_time, self.num_left = at_a_time, in_all
        self.report = SimpleNamespace(kind="fake")
        self.sent_bytes = {"fake": 0, "inline": 0}

    def writer(self, link_id: int, connection: int) -> RoomForRows:
        return self

    def put(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[PlaneReference] | None:
        if len(rows) > min(self.at_a_time, self.num_left):
            return None
        self.num_left -= len(rows)
        row_bytes = rows.shape[1] * rows.element_size()
        return [PlaneReference(b"p" * 16, 0, size * row_bytes, 1 + index) for index, size in enumerate(sizes)]


def handed(planes: Any, sizes: Sequence[int]) -> list[HiddenStates]:
    """States of one job for each of these numbers of rows."""
    jobs: list[Any] = [SimpleNamespace(link_id=1, score=SimpleNamespace(plane=1)) for _ in sizes]
    handover = StateHandover(planes)
    handover.begin([(job, 3, torch.full((size, WIDTH), float(size))) for job, size in zip(jobs, sizes, strict=True)])
    found = handover.finish()
    return [found[id(job)] for job in jobs]


@pytest.mark.parametrize(
    ("at_a_time", "in_all", "by_plane"),
    [(40, 40, [True] * 4), (10, 40, [True] * 4), (40, 25, [True, True, False, False]), (9, 40, [False] * 4)],
)
def test_as_many_sessions_as_the_plane_has_room_for_go_by_it(at_a_time: int, in_all: int, by_plane: list[bool]) -> None:
    planes = RoomForRows(at_a_time, in_all)
    states = handed(planes, [10] * 4)
    assert [bool(each.references) for each in states] == by_plane
    assert [(each.start, each.num_rows) for each in states] == [(3, 10)] * 4
    assert planes.sent_bytes == {"fake": 160 * sum(by_plane), "inline": 160 * (4 - sum(by_plane))}
    assert all(each.payload == torch.full((10, WIDTH), 10.0).numpy().tobytes() for each in states if each.payload)
