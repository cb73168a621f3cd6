"""Random faults of drafting ahead, drawn from a seed: what passes by the channel, its path, both services, their pages.

Owns the faults and when they happen. Whatever happens, tokens are those of the target alone, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch
from outrider.proposal_channel import messages, pushes, receiver, sender
from outrider.proposal_channel import verdicts as verdict_messages
from outrider.proposal_channel.pushes import Pushes
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.proposal_channel.verdicts import Verdicts
from outrider.transport import channel_streams
from outrider.transport.channels import keepalive
from outrider.transport.remote import RemoteTarget
from outrider.types import PeerAddress
from tests.end_to_end.faults import Gate, break_links, gate_of, outage
from tests.end_to_end.waiting import eventually
from tests.support.stack import Stack
from tests.support.tcp_proxy import Direction, TcpProxy

NUM_REMEMBERED = 12
"""Messages that may be sent again much later."""
_WRONG = 0.25
"""Share of messages that are changed."""
_WAYS: tuple[tuple[Direction, ...], ...] = (("up",), ("down",), ())
"""Directions of a fault of the path; none: both."""


@dataclass
class Messages:
    """Messages of proposal channels, some of them lost, forged, in another order or out of date."""

    chance: random.Random
    is_wrong: bool = True
    changed: dict[str, int] = field(default_factory=dict)
    _old: dict[str, deque[bytes]] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """Kinds of messages of which some were changed."""
        return {name.partition(" ")[0] for name in self.changed}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between both services and their sockets."""
        patch.setattr(sender, "to_bytes", partial(self._sent, "proposals", messages.to_bytes, self._proposals))
        patch.setattr(sender, "pushes_to_bytes", partial(self._sent, "pushes", pushes.to_bytes, self._pushes))
        patch.setattr(receiver, "to_bytes", partial(self._sent, "verdicts", verdict_messages.to_bytes, self._verdicts))

    def _sent(self, kind: str, honest: Callable[[Any], bytes], change: Callable[[Any], list[Any]], sent: Any) -> bytes:
        content = honest(sent)
        old = self._old.setdefault(kind, deque(maxlen=NUM_REMEMBERED))
        old.append(content)
        if not self.is_wrong or self.chance.random() > _WRONG:
            return content
        fault = self.chance.choice(("lost", "stale", "repeated", "changed", "changed"))
        self.changed[f"{kind} {fault}"] = self.changed.get(f"{kind} {fault}", 0) + 1
        if fault == "lost":
            return b""
        if fault == "stale":
            return self.chance.choice(old)
        if fault == "repeated":
            return content + self.chance.choice(old) + content
        return b"".join(map(honest, change(sent)))

    def _proposals(self, sent: AnswerBatch[Any]) -> list[AnswerBatch[Any]]:
        kind = self.chance.randrange(4)
        if kind == 0:
            return [replace(sent, token_ids=self._other_tokens(sent.token_ids))]
        if kind == 1:
            return [replace(sent, generations=sent.generations + np.uint64(self.chance.choice((1, 2, 40))))]
        if kind == 2:
            return [replace(sent, sessions=sent.sessions[::-1].copy())]
        return [replace(sent, sessions=sent.sessions + np.uint64(1))]

    def _pushes(self, sent: Pushes) -> list[Pushes]:
        kind = self.chance.randrange(6)
        if kind == 0:
            return [replace(sent, token_ids=self._other_tokens(sent.token_ids))]
        if kind == 1:
            lengths = np.maximum(sent.base_lengths.astype(np.int64) + self.chance.choice((-2, -1, 1, 5, 1000)), 0)
            return [replace(sent, base_lengths=lengths.astype(sent.base_lengths.dtype))]
        if kind == 2:
            return [replace(sent, sessions=sent.sessions[::-1].copy())]
        if kind == 3:
            return [replace(sent, sessions=sent.sessions + np.uint64(self.chance.choice((1, 99))))]
        if kind == 4:
            return [replace(sent, text_hashes=sent.text_hashes[::-1].copy())]
        bounds = np.concatenate([[0], sent.counts.cumsum(dtype=np.int64)])
        alone = [
            replace(
                sent,
                sessions=sent.sessions[row : row + 1],
                base_lengths=sent.base_lengths[row : row + 1],
                text_hashes=sent.text_hashes[row : row + 1],
                counts=sent.counts[row : row + 1],
                token_ids=sent.token_ids[bounds[row] : bounds[row + 1]],
            )
            for row in range(len(sent.sessions))
        ]
        self.chance.shuffle(alone)
        return alone

    def _verdicts(self, sent: Verdicts) -> list[Verdicts]:
        changes = (
            {"next_token_ids": (sent.next_token_ids + 1) % 200},
            {"num_accepted": sent.num_accepted + 1},
            {"num_accepted": sent.num_accepted * 0},
            {"base_lengths": np.maximum(sent.base_lengths.astype(np.int64) - 1, 0).astype(np.uint32)},
            {"base_lengths": sent.base_lengths + 7},
            {"generations": sent.generations + 50},
            {"sessions": sent.sessions + 1},
            {"sessions": sent.sessions[::-1].copy()},
            {"last_token_ids": (sent.last_token_ids + 1) % 200},
        )
        kind = self.chance.randrange(len(changes) + 2)
        if kind < len(changes):
            return [replace(sent, **changes[kind])]
        columns = [getattr(sent, name) for name in Verdicts.__slots__]
        alone = [Verdicts(*[column[row : row + 1] for column in columns]) for row in range(len(sent))]
        self.chance.shuffle(alone)
        return alone

    def _other_tokens(self, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shift = np.uint32(self.chance.randrange(1, 100))
        return ((token_ids + shift) % 200).astype(token_ids.dtype)


@contextlib.asynccontextmanager
async def through_a_proxy(patch: pytest.MonkeyPatch) -> AsyncIterator[TcpProxy]:
    """A path of channels between hosts, whose keepalive is short."""
    patch.setattr("outrider_draft.service.channel_host", lambda: "another host")
    patch.setattr(channel_streams, "PATH_KEEPALIVE", keepalive(100, 200))
    for module in ("introductions", "channel_introductions"):
        patch.setattr(f"outrider_coordinator.routing.{module}.RETRY_S", 0.02)
    patch.setattr("outrider_target.service.ProposalReceiver", partial(ProposalReceiver, patience_s=0.3))
    async with TcpProxy().running() as proxy:

        def through(target: RemoteTarget) -> PeerAddress:
            proxy.server_port = int(target.address.rpartition(":")[2])
            return PeerAddress(proxy.address)

        patch.setattr(RemoteTarget, "peer_address", property(through))
        yield proxy


@dataclass
class Faults:
    """Faults of one stack, one after the other, while streams run."""

    stack: Stack
    proxy: TcpProxy
    chance: random.Random
    kills: bool = True
    """True: services may lose their links and sessions, and hang."""
    is_over: bool = False
    """Set from outside: no fault begins any more."""
    happened: dict[str, int] = field(default_factory=dict)

    @property
    def of_services(self) -> set[str]:
        """Kinds of faults of the services themselves that happened."""
        return {kind for kind in self.happened if " of " in kind}

    async def play(self) -> None:
        """One fault after the other, with time for a channel between them; the last is over when this returns."""
        with contextlib.ExitStack() as held:
            gates = {
                role: held.enter_context(gate_of(service.runner))
                for role, service in (("target", self.stack.target), ("draft", self.stack.draft))
                if service is not None and service.runner is not None  # a head has none
            }
            while not self.is_over:
                await asyncio.sleep(self.chance.choice((0.0, 0.1, 0.5)))
                await self._one(gates)

    async def _one(self, gates: dict[str, Gate]) -> None:
        path = [*["delay"] * 6, "cut", "stall", "black hole"]
        kills = [f"{each} of {role}" for each in ("outage", "links") for role in ("draft", "target")]
        kills += [f"hang of {role}" for role in ("draft", "target") if role in gates]
        kind = self.chance.choice([*path, *(kills if self.kills else [])])
        name, _, service = kind.partition(" of ")
        held_s = self.chance.choice((0.01, 0.05, 0.2))
        if kind == "delay":
            longest, delays = self.chance.choice((0.0, 0.002, 0.01, 0.03)), random.Random(self.chance.random())
            self.proxy.delay_s = lambda: delays.random() * longest
        elif kind == "cut":
            self.proxy.cut()
        elif kind in ("stall", "black hole"):
            await (self.proxy.stall if kind == "stall" else self.proxy.black_hole)(*self.chance.choice(_WAYS))
            await asyncio.sleep(held_s)
            await self.proxy.heal()
        elif name == "outage":
            async with outage(self.stack, service):
                await asyncio.sleep(held_s)
        elif name == "links":
            break_links(getattr(self.stack, service))
        else:
            gate = gates[service]
            try:
                async with asyncio.timeout(0.5):
                    await gate.shut()
                await asyncio.sleep(held_s)
            except TimeoutError:
                return  # no forward was there to hang
            finally:
                gate.open()
        self.happened[kind] = self.happened.get(kind, 0) + 1


async def left_nothing(stack: Stack) -> None:
    """Nothing runs and every page is free, once the services have noticed what was lost."""
    services = [each for each in (stack.target, stack.draft) if each is not None]
    await eventually(lambda: not any(each.num_sessions for each in services), "no sessions")
    await eventually(lambda: stack.num_pages_used() == (0, 0), "free pages")
