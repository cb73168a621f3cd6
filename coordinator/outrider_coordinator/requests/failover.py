"""Failover: moves sessions when targets and drafts are lost and come back.

Owns the order in which sessions over which targets may break are retried. Sends nothing itself: it notifies the session
of its new place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from outrider.errors import UnavailableError
from outrider.telemetry.logs import records_about
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.partners import share_device
from outrider_coordinator.routing.placement import Placement
from outrider_coordinator.routing.services import DraftReplica, Services, TargetReplica
from outrider_coordinator.session.draft_side import DraftFacts

_log = logging.getLogger(__name__)

Deliver = Callable[[RequestState, Callable[[], None]], None]
"""Brings an event to a request's session."""


class Failover:
    """The moves of one coordinator's sessions."""

    def __init__(
        self,
        services: Services,
        placement: Placement,
        request_manager: RequestManager,
        deliver: Deliver,
        *,
        target_timeout_s: float,
    ) -> None:
        """``target_timeout_s``: how long a session without a target waits for one."""
        self.has_suspects = False
        """Sessions over which targets may break are running, and some may wait for their turn."""
        self._services = services
        self._placement = placement
        self._request_manager = request_manager
        self._deliver = deliver
        self._target_timeout_s = target_timeout_s

    def target_lost(self, replica: TargetReplica) -> None:
        """The sessions of the target move to others, or pause until there is one."""
        self._placement.remove_target(replica)
        orphans = [request for request in self._request_manager.running() if request.place.target is replica]
        for request in orphans:
            self._placement.leave_target(request.place)
            self._lose(request, request.loop.target_lost, "target is lost: it is rebuilt when a target is available")
        self.has_suspects = self.has_suspects or any(request.loop.is_suspect for request in orphans)
        self.find_targets(orphans)
        for request in orphans:
            if request.place.target is None and not request.is_over:
                self._give_up_later(request)

    def draft_lost(self, replica: DraftReplica) -> None:
        """The sessions of the draft move to another one, or continue without."""
        self._placement.remove_draft(replica)
        orphans = [request for request in self._request_manager.running() if request.place.draft is replica]
        for request in orphans:
            self._placement.leave_draft(request.place)
            self._lose(request, request.loop.draft_lost, "draft is lost: it continues without until one is available")
        self.find_drafts(orphans)

    def find_targets(self, requests: Iterable[RequestState]) -> None:
        """Place the requests without a target, as far as targets are attached. Those that were lost most often without
        an answer between are placed first, or they would be the last of each target that is killed; suspects last.
        """
        for request in sorted(requests, key=_turn):
            request.place.refused_by.clear()
            if request.place.target is not None or request.is_over or self._waits_its_turn(request):
                continue
            if self._placement.place_on_target(request.place):
                self._deliver(request, request.loop.target_back)

    def find_drafts(self, requests: Iterable[RequestState]) -> None:
        """Place the requests without a draft that would use one."""
        for request in requests:
            self.find_draft(request)

    def find_draft(self, request: RequestState, *, besides: DraftReplica | None = None) -> None:
        """Place the request on a draft if it would use one; on ``besides`` only if there is no other."""
        if request.place.draft is not None or request.is_over or not request.loop.lacks_draft:
            return
        replica = self._placement.place_on_draft(request.place, besides=besides)
        if replica is not None:
            self._deliver(request, partial(request.loop.draft_back, _facts_of(replica, request.place.target)))

    def retry_draft(self, request: RequestState, retry_after_ms: int) -> None:
        """Remove the request from its draft, and find another after a delay."""
        refuser = request.place.draft
        request.call_later(retry_after_ms / 1000, partial(self._retry_draft, request, refuser))
        self._placement.leave_draft(request.place)

    def _retry_draft(self, request: RequestState, refuser: DraftReplica | None) -> None:
        if self._is_running(request):  # otherwise it is given one when it starts again
            self.find_draft(request, besides=refuser)

    # Sessions over which targets broke.

    def _waits_its_turn(self, request: RequestState) -> bool:
        """True if a session waits for another one over which targets broke, so that it shows which of them was the
        cause.
        """
        return request.loop.is_suspect and any(
            other.place.target is not None and other.loop.is_suspect for other in self._request_manager.running()
        )

    def send_next_suspect(self) -> None:
        """Retry the next suspect session after an answer or an end."""
        running = self._request_manager.running()
        self.has_suspects = any(request.loop.is_suspect for request in running)
        self.find_targets([request for request in running if request.loop.is_suspect])

    def _give_up_later(self, request: RequestState) -> None:
        request.call_later(self._target_timeout_s, partial(self._give_up_on, request, request.place.num_moves))

    def _give_up_on(self, request: RequestState, num_moves: int) -> None:
        """Failure of a request that no target could hold, although there may be targets."""
        place = request.place
        if self._services.target.is_up and request.loop.is_suspect:
            request.call_later(self._target_timeout_s, partial(self._give_up_on, request, num_moves))
        elif place.target is None and place.num_moves == num_moves and self._is_running(request):
            error = UnavailableError(f"no target that could hold it was back after {self._target_timeout_s:g} s")
            self._deliver(request, partial(request.loop.fail, error))

    def _lose(self, request: RequestState, event: Callable[[], None], loss: str) -> None:
        with records_about(request.log_fields):
            _log.info("the session's %s", loss)
        self._deliver(request, event)

    def _is_running(self, request: RequestState) -> bool:
        return self._request_manager.find(request.session) is request


def _turn(request: RequestState) -> int:
    """Sort key of requests that are placed again; of suspects the one with the fewest losses is first, so that each has
    its turn.
    """
    losses = request.loop.target.losses
    return losses if request.loop.is_suspect else -losses


def _facts_of(replica: DraftReplica, target: TargetReplica | None) -> DraftFacts:
    """Facts of the draft for a session on it and on ``target``."""
    found = replica.description
    if found is None:
        return DraftFacts()
    beside = None if target is None else target.description
    item_bytes = 4 if beside is not None and beside.dtype == "float32" else 2
    state_bytes = found.hidden_size * len(found.hidden_state_layers) * item_bytes
    return DraftFacts(
        found.max_model_len,
        found.num_token_ids,
        found.hidden_state_layers,
        target is not None and share_device(target, replica),
        state_bytes,
        found.longest_prefill,
    )
