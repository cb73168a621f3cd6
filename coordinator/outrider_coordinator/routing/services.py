"""Services of a coordinator: which targets and drafts are accepted, and reactions to changes.

Owns the replicas of both services, the model that they serve, and the wait for a lost target. A listener gets the
events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from outrider.errors import OutriderError, UnavailableError
from outrider.ports import DraftCommand, DraftEvent, EventBatch, TargetCommand, TargetEvent
from outrider.types import ModelDescription
from outrider_coordinator.routing.dispatch import DispatchScheduler
from outrider_coordinator.routing.model_pair import check_pair, check_same_model
from outrider_coordinator.routing.peers import Peers
from outrider_coordinator.routing.replica import Replica, ReplicaEvents
from outrider_coordinator.routing.replicas import Replicas, Source

TargetReplica = Replica[TargetCommand, TargetEvent]
DraftReplica = Replica[DraftCommand, DraftEvent]


class ServiceListener(Protocol):
    """Receiver of events and changes of the services."""

    def on_target_batch(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> None:
        """Events of a target."""

    def on_draft_batch(self, replica: DraftReplica, batch: EventBatch[DraftEvent]) -> None:
        """Events of a draft."""

    def target_attached(self, replica: TargetReplica) -> None:
        """A target is attached, for the first time or again."""

    def target_lost(self, replica: TargetReplica) -> None:
        """The link of a target has ended."""

    def target_given_up(self, error: OutriderError) -> None:
        """No target came back in time."""

    def draft_attached(self, replica: DraftReplica) -> None:
        """A draft is attached, for the first time or again."""

    def draft_lost(self, replica: DraftReplica) -> None:
        """The link of a draft has ended."""


class Services:
    """The attached targets and drafts."""

    def __init__(
        self,
        targets: Source[TargetCommand, TargetEvent],
        drafts: Source[DraftCommand, DraftEvent] | None,
        listener: ServiceListener,
        *,
        peers: Peers,
        on_model: Callable[[ModelDescription], None],
        target_timeout_s: float,
    ) -> None:
        """``on_model`` sees the first target before it is attached, and raises what speaks against it; afterwards it is
        told of the limits whenever a target is attached.
        """
        self._listener = listener
        self._on_model = on_model
        self._target_timeout_s = target_timeout_s
        self._model: ModelDescription | None = None
        self._target_known = asyncio.Event()
        self._give_up_timer: asyncio.TimerHandle | None = None
        self.has_given_up = False
        """True if no target is waited for any more."""
        self.peers = peers
        dispatch = DispatchScheduler()
        of_targets: ReplicaEvents[TargetCommand, TargetEvent] = ReplicaEvents(
            self.accept_target, self.target_attached, self.target_lost, listener.on_target_batch, peers.on_event
        )
        self.target: Replicas[TargetCommand, TargetEvent] = Replicas(targets, "target", of_targets, dispatch)
        self.draft: Replicas[DraftCommand, DraftEvent] | None = None
        if drafts is not None:
            of_drafts: ReplicaEvents[DraftCommand, DraftEvent] = ReplicaEvents(
                self.accept_draft, self.draft_attached, self.draft_lost, listener.on_draft_batch, peers.on_event
            )
            self.draft = Replicas(drafts, "draft", of_drafts, dispatch)

    async def start(self) -> None:
        """Attach to a target, without a time limit, and try the drafts once; raises errors that waiting does not
        resolve.
        """
        self.target.start()
        if self.draft is not None:
            self.draft.start()
        await self.target.first_try()
        await self._target_known.wait()
        if self.draft is not None:
            await self.draft.first_try()

    async def close(self) -> None:
        """Close all links."""
        self.stop_waiting()
        self.peers.close()
        if self.draft is not None:
            await self.draft.close()
        await self.target.close()

    def stop_waiting(self) -> None:
        """Stop the wait for a lost target."""
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def require_target(self) -> ModelDescription:
        """Description of the target with the limits of its largest replica; ``UnavailableError`` until one was
        attached.

        A session is placed where it fits, so a request is admitted if one replica can hold it.
        """
        found = self.target.descriptions
        if not found:
            if self._model is None or not self._target_known.is_set():
                raise UnavailableError("no target has been attached yet")
            return self._model
        return replace(
            max(found, key=lambda description: description.num_pages * description.page_size),
            max_model_len=max(description.max_model_len for description in found),
        )

    def target_attached(self, replica: TargetReplica) -> None:
        """A target is attached: end all waits for one."""
        self._target_known.set()
        self.stop_waiting()
        self.has_given_up = False
        self._on_model(self.require_target())
        for draft in () if self.draft is None else self.draft.attached:
            self.peers.introduce(replica, draft)
        self._listener.target_attached(replica)

    def target_lost(self, replica: TargetReplica) -> None:
        """A target is lost: if it was the last, start the timeout."""
        self.peers.lost(replica)
        if not self.target.is_up:  # no timer is set: the target's attachment has ended the wait
            self._give_up_timer = asyncio.get_running_loop().call_later(self._target_timeout_s, self._give_up)
        self._listener.target_lost(replica)

    def _give_up(self) -> None:
        self.has_given_up = True
        self._listener.target_given_up(UnavailableError(f"the target was not back after {self._target_timeout_s:g} s"))

    async def accept_target(self, description: ModelDescription) -> None:
        """The first target determines the model; ``PairMismatchError`` for another one."""
        if self._model is None:
            self._on_model(description)
            self._model = description
        else:
            check_same_model(self._model, description)

    async def accept_draft(self, description: ModelDescription) -> None:
        """``PairMismatchError`` for a draft that does not fit the target."""
        await self._target_known.wait()
        check_pair(self.require_target(), description)

    def draft_attached(self, replica: DraftReplica) -> None:
        """A draft is attached."""
        for target in self.target.attached:
            self.peers.introduce(target, replica)
        self._listener.draft_attached(replica)

    def draft_lost(self, replica: DraftReplica) -> None:
        """A draft is lost."""
        self.peers.lost(replica)
        self._listener.draft_lost(replica)
