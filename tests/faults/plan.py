"""Faults drawn from a seed, and what each does to a stack."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.proxy import Direction, Impairment
from tests.faults.stack import Stack

_BOTH = tuple(Direction)
_WAYS = (_BOTH, (Direction.TO_SERVICE,), (Direction.FROM_SERVICE,))


class Kind(enum.StrEnum):
    """Action of the fault."""

    KILL = "kill"
    """SIGKILL; the process is started again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT later."""
    HANG = "hang"
    """The compute thread stops for good, or the event loop of a process without one; the process ends itself."""
    HANG_RANK = "hang rank of"
    """The same of the second rank of a model that two share."""
    CUT = "cut"
    """Connections of its link are reset."""
    REFUSE = "refuse"
    """The same, and so is every new connection for a while."""
    STALL = "stall"
    """Bytes wait for a while, and come then."""
    BLACK_HOLE = "black hole"
    """Bytes vanish for a while; a connection that lost some never comes back."""
    DELAY = "delay"
    """Bytes come late for a while."""
    DRIBBLE = "dribble"
    """Bytes come a few at a time for a while."""
    TRUNCATE = "truncate"
    """A message is cut short, and its connection ends."""


LINK_KINDS = (Kind.CUT, Kind.REFUSE, Kind.STALL, Kind.BLACK_HOLE, Kind.DELAY, Kind.DRIBBLE, Kind.TRUNCATE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan."""

    number: int
    kind: Kind
    victim: str
    """A process, by its name."""
    pause_s: float
    """Pause before it, after the stack has recovered from the one before."""
    hold_s: float
    """Duration of a fault that lasts."""
    directions: tuple[Direction, ...] = _BOTH
    amount: float = 0.0
    """Seconds of delay, or bytes a second."""
    waits: bool = True
    """True if the stack is to be whole again before the next fault."""

    def __str__(self) -> str:
        ways = "" if self.directions == _BOTH else f" {self.directions[0].value}"
        amount = f" of {self.amount:g}" if self.amount else ""
        held = f" for {self.hold_s:.1f} s" if self.hold_s else ""
        return f"fault {self.number}: {self.kind} {self.victim}{ways}{amount}{held}{'' if self.waits else ', and on'}"


def draw_plan(
    rng: random.Random,
    count: int,
    *,
    kinds: Sequence[Kind],
    victims: Sequence[str],
    hold_s: tuple[float, float] = (0.2, 4.0),
    overlapping: float = 0.0,
) -> list[Fault]:
    """Random faults; ``overlapping`` is the share of those after which the next comes without waiting."""
    return [_draw(rng, number, rng.choice(kinds), rng.choice(victims), hold_s, overlapping) for number in range(count)]


def _draw(
    rng: random.Random, number: int, kind: Kind, victim: str, hold_s: tuple[float, float], overlapping: float
) -> Fault:
    lasts = kind not in {Kind.KILL, Kind.HANG, Kind.HANG_RANK, Kind.CUT, Kind.TRUNCATE}
    is_one_way = kind in {Kind.STALL, Kind.BLACK_HOLE, Kind.DELAY, Kind.DRIBBLE, Kind.TRUNCATE}
    amounts = {Kind.DELAY: rng.uniform(0.01, 0.5), Kind.DRIBBLE: rng.uniform(500, 20_000)}
    return Fault(
        number,
        kind,
        victim,
        pause_s=rng.uniform(0.0, 1.0),
        hold_s=rng.uniform(*hold_s) if lasts else 0.0,
        directions=rng.choice(_WAYS) if is_one_way else _BOTH,
        amount=round(amounts.get(kind, 0.0), 3),
        waits=rng.random() >= overlapping,
    )


async def inflict(stack: Stack, fault: Fault) -> None:
    """Do it, hold it, and end it."""
    if fault.kind in {Kind.KILL, Kind.STOP, Kind.HANG, Kind.HANG_RANK}:
        await _to_process(stack, fault)
    else:
        await _to_link(stack, fault)


async def _to_process(stack: Stack, fault: Fault) -> None:
    process = stack.process(fault.victim)
    await process.running()
    if fault.kind is Kind.KILL:
        process.kill()
        return
    if fault.kind in {Kind.HANG, Kind.HANG_RANK}:
        pid = process.pid
        process.hang(is_rank=fault.kind is Kind.HANG_RANK)
        await process.replaced(pid)
        return
    process.freeze()
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        process.thaw()


async def _to_link(stack: Stack, fault: Fault) -> None:
    proxy = stack.proxies[fault.victim]
    match fault.kind:
        case Kind.CUT:
            proxy.cut()
            return
        case Kind.TRUNCATE:
            for direction in fault.directions:
                proxy.truncate(direction)
            return
        case Kind.REFUSE:
            proxy.refuse()
        case _:
            proxy.impair(_impairment(fault), *fault.directions)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        proxy.restore()


def _impairment(fault: Fault) -> Impairment:
    return {
        Kind.STALL: Impairment(is_stalled=True),
        Kind.BLACK_HOLE: Impairment(is_black_hole=True),
        Kind.DELAY: Impairment(delay_s=fault.amount),
        Kind.DRIBBLE: Impairment(bytes_per_s=fault.amount),
    }[fault.kind]
