"""A target that gives up scores ahead, for which something else was asked since, is no trouble that a log tells of."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.ports import EventBatch, SessionLost
from tests.coordinator.routing.fleet import Found, ask, eventually, fleet, own_tokens, target


@pytest.mark.parametrize(("num_behind", "is_told"), [(0, True), (1, False)])
async def test_only_a_loss_of_what_is_asked_for_is_told(
    num_behind: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    toy = target()
    async with fleet(Found(toy)) as made:
        await eventually(lambda: made.is_attached(1))
        stream = made.stream(ask())
        await stream.read(5)
        toy.faults.hold = True
        (request,) = made.coordinator.request_manager.running()
        for _ in range(20):  # the last step that was answered is over then
            await asyncio.sleep(0)
        await eventually(lambda: request.loop.target.asked is not None)
        replica, asked = request.place.target, request.loop.target.asked
        assert replica is not None and asked is not None
        lost = SessionLost(request.session, asked - num_behind, "no proposals came")
        with caplog.at_level(logging.WARNING):
            made.coordinator.driver.on_target_batch(replica, EventBatch((lost,)))
            await asyncio.sleep(0)
        assert ("lost the session: no proposals came" in caplog.text) is is_told
        assert request.loop.spec_stats.num_target_losses == is_told
        toy.faults.hold = False
        toy.release_held()
        assert (await stream.finish()).token_ids == await own_tokens(ask())
