"""Faults of a service, done to a real one at a moment of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from outrider.batched import CommandBatch, num_items
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Extend, Score
from outrider.transport.server import serve_draft, serve_target
from tests.end_to_end.waiting import DEADLINE_S, eventually
from tests.support.stack import Stack

Rows = Sequence[ForwardRow]


@contextmanager
def around_forwards(runner: ModelRunner, before: Callable[[Rows], None]) -> Iterator[None]:
    """Call ``before`` with the rows of each forward, in the engine's thread."""
    forward = runner.forward_batch

    def watched(batch: RowBatch, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before([ForwardRow(*row) for row in zip(batch.sequences, batch.tails(), strict=True)])
        return forward(batch, *given, **named)

    runner.forward_batch = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.forward_batch = forward  # type: ignore[method-assign]


class Gate:
    """Holds a runner's forwards, before they compute, while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._holds = threading.Event()

    def wait(self, rows: Rows) -> None:
        if not self._open.is_set():
            self._holds.set()
            assert self._open.wait(DEADLINE_S), "nobody opened the gate"

    def open(self) -> None:
        self._holds.clear()
        self._open.set()

    async def shut(self) -> None:
        """Return when a forward is being held."""
        self._open.clear()
        await eventually(self._holds.is_set, "a forward at the gate")


@contextmanager
def gate_of(runner: ModelRunner | None) -> Iterator[Gate]:
    """A gate in front of a runner's forwards, open at first and in the end."""
    assert runner is not None
    gate = Gate()
    with around_forwards(runner, gate.wait):
        try:
            yield gate
        finally:
            gate.open()


def break_links(service: Any) -> None:
    """Loss of a service's links as its users see it; it has released their sessions when they come again."""
    for link in service.thread.links:
        link.break_off("broken by a test")


def lose_sessions(service: Any, *, at_item: int) -> None:
    """Loss of every session of a link by the service, when item number ``at_item`` from now on arrives."""
    core = service.core
    handle, seen = core.handle, 0

    def forgetful(link_id: int, commands: Sequence[Any], *, arrived_ns: int | None = None) -> None:
        nonlocal seen
        before = seen
        seen += num_items([command for command in commands if isinstance(command, Extend | Score | CommandBatch)])
        if before < at_item <= seen:
            core.drop_link(link_id)
        handle(link_id, commands, arrived_ns=arrived_ns)

    core.handle = forgetful


@contextmanager
def poisoned(runner: ModelRunner | None, first_token: int, *, at_length: int) -> Iterator[None]:
    """Model whose KV is NaN from ``at_length`` tokens on in the session whose text begins with ``first_token``."""
    assert runner is not None

    @torch.inference_mode()
    def poison(rows: Rows) -> None:
        for row in rows:
            sequence = row.sequence
            if sequence.token_ids[:1] == [first_token] and sequence.length >= at_length:
                for page in sequence.page_table:
                    for group in runner.kv_cache.groups:
                        group[:, page * runner.page_size : (page + 1) * runner.page_size] = torch.nan

    with around_forwards(runner, poison):
        yield


@asynccontextmanager
async def outage(stack: Stack, role: str) -> AsyncIterator[None]:
    """The server of "draft" or "target" is gone inside, and listens again at the same address afterwards."""
    await getattr(stack, f"{role}_server").stop()
    yield
    service: Any = getattr(stack, role)
    port = int(stack.addresses[role].rpartition(":")[2])
    if role == "draft":
        stack.draft_server = await serve_draft(service, host="127.0.0.1", port=port)
    else:
        stack.target_server = await serve_target(
            service, host="127.0.0.1", port=port, admit_channel=service.admit_channel
        )
