"""Driver: the running parts of a coordinator, and their reactions to attached and lost services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from outrider.config import CoordinatorSettings
from outrider.config.fields import DraftAhead
from outrider.errors import OutriderError
from outrider.ports import DraftCommand, DraftEvent, TargetCommand, TargetEvent
from outrider.types import ModelDescription
from outrider_coordinator.requests.failover import Failover
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_runner import RequestRunner
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.requests.session_driver import SessionDriver
from outrider_coordinator.routing.peers import Peers
from outrider_coordinator.routing.placement import Placement
from outrider_coordinator.routing.replicas import Source
from outrider_coordinator.routing.services import DraftReplica, Services, TargetReplica
from outrider_coordinator.session.actions import Fail, Finish


class Driver:
    """Sessions of one coordinator on its services: a ``ServiceListener``."""

    def __init__(
        self,
        targets: Source[TargetCommand, TargetEvent],
        drafts: Source[DraftCommand, DraftEvent] | None,
        request_manager: RequestManager,
        settings: CoordinatorSettings,
        *,
        on_model: Callable[[ModelDescription], None],
        on_target: Callable[[bool], None],
    ) -> None:
        """``on_target`` is told of the first target attached and the last lost; ``on_model`` is as for ``Services``."""
        self._request_manager = request_manager
        self._on_target = on_target
        peers = Peers(settings)
        if settings.draft_ahead is DraftAhead.AUTO:
            request_manager.policy.take_order = peers.channels.take_order
        self._sessions = SessionDriver(
            request_manager,
            settings.draft_timeout_ms / 1000,
            self,
            peers,
            max_messages_per_s=settings.max_stream_messages_per_s,
        )
        self.on_target_batch = self._sessions.on_target_batch
        self.on_draft_batch = self._sessions.on_draft_batch
        self._deliver = self._sessions.deliver
        self.services = Services(
            targets,
            drafts,
            self,
            peers=peers,
            on_model=on_model,
            target_timeout_s=settings.target_timeout_s,
        )
        self.placement = Placement(self.services, request_manager.policy)
        self._failover = Failover(
            self.services, self.placement, request_manager, self._deliver, target_timeout_s=settings.target_timeout_s
        )
        self._runner = RequestRunner(self.services, self.placement, request_manager, self._failover, self._deliver)
        self.submit, self.park = self._runner.submit, self._runner.park
        self.found_capacity = self._runner.found_capacity
        self.retry_draft = self._failover.retry_draft

    # Requests.

    def expire_after(self, request: RequestState, seconds: float) -> None:
        """End the request with ``DeadlineError`` after this time."""
        request.call_later(seconds, partial(self._deliver, request, request.loop.expire))

    def cancel(self, request: RequestState) -> None:
        """End the request, unless it has ended."""
        self._deliver(request, request.loop.cancel)

    def fail_all(self, error: OutriderError) -> None:
        """End every request with this error."""
        for request in self._request_manager.all():
            self._deliver(request, partial(request.loop.fail, error))

    # Sessions.

    def end(self, request: RequestState, ending: Finish | Fail) -> None:
        """The session, and with it the request, has ended."""
        self._runner.end(request, ending)
        if self._failover.has_suspects:
            asyncio.get_running_loop().call_soon(self._failover.send_next_suspect)

    def answered(self) -> None:
        """A message of a target was processed."""
        if self._failover.has_suspects:
            self._failover.send_next_suspect()

    # Services.

    def target_attached(self, replica: TargetReplica) -> None:
        """A target is attached: sessions without one continue, and waiting requests may start."""
        num_targets = len(self.services.target.attached)
        self._request_manager.set_num_targets(num_targets)
        if num_targets == 1:
            self._on_target(True)
        self._runner.fail_too_long_requests(self.services.require_target())
        self._failover.find_targets(self._request_manager.running())
        self._runner.unblock()

    def target_lost(self, replica: TargetReplica) -> None:
        """The link of a target has ended."""
        self._request_manager.set_num_targets(len(self.services.target.attached))
        if not self.services.target.is_up:
            self._on_target(False)
        self._failover.target_lost(replica)

    def target_given_up(self, error: OutriderError) -> None:
        """No target came back in time: all requests fail."""
        self.fail_all(error)

    def draft_attached(self, replica: DraftReplica) -> None:
        """A draft is attached: sessions without one may speculate."""
        self._sessions.draft_waits.attached(replica)
        self._failover.find_drafts(self._request_manager.running())

    def draft_lost(self, replica: DraftReplica) -> None:
        """The link of a draft has ended."""
        self._sessions.draft_waits.lost(replica)
        self._failover.draft_lost(replica)
        self._sessions.draft_lost(replica)
