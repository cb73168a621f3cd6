"""Link counts: a host has so many links open, and no more."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import CapacityError, OutriderError
from outrider.transport import servicers
from outrider.transport.link.counts import LinkCounts, host_of
from outrider.transport.remote import RemoteDraft
from tests.support.scripted_ports import ToyDraft, random_rows
from tests.transport.conftest import Serve


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv6:%5B::1%5D:80", "%5B::1%5D"),
        ("unix:/tmp/x", "unix"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_hosts_are_told_apart_and_ports_are_not(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_a_host_is_refused_past_the_bound_and_taken_again_after_a_link_has_ended() -> None:
    counts = LinkCounts(2)
    with counts.entered("ipv4:1.1.1.1:1"):
        with counts.entered("ipv4:1.1.1.1:2"):
            with pytest.raises(CapacityError, match="has 2 links open here"), counts.entered("ipv4:1.1.1.1:3"):
                pass
            with counts.entered("ipv4:2.2.2.2:1"):
                pass
        with counts.entered("ipv4:1.1.1.1:3"):
            pass


async def test_a_link_past_the_bound_is_refused_with_a_reason_and_the_others_go_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicers, "LinkCounts", lambda: LinkCounts(2))
    draft = ToyDraft(random_rows(9, seed=1), 9)
    server = await serve("draft", draft)
    remote = RemoteDraft(server.address)
    open_links = [await remote.attach() for _ in range(2)]
    async with asyncio.timeout(240):
        while len(draft.links) < 2:
            await asyncio.sleep(0.01)
    refused = await remote.attach()
    with pytest.raises(OutriderError, match="has 2 links open here, as many as one host may"):
        async with asyncio.timeout(240):
            await anext(refused.events())
    for link in (refused, *open_links):
        await link.close()
    assert len(draft.links) == 2
