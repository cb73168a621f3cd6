"""The target's tensor plane: an offer for each draft that a coordinator names, and which connection is whose.

Owns nothing of how bytes travel, which is ``outrider.tensor_plane``'s, and imports it when a first offer is asked for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.addresses import bare_host
from outrider.planes import PlaneKind, PlaneOffer, PlaneReport
from outrider.ports import ClosePlane, OfferPlane, PlaneChosen, PlaneCommand, PlaneEvent, RequestPlane
from outrider.readings import Reading, each
from outrider.serving.in_process.plane_host import refusal

if TYPE_CHECKING:
    import torch

    from outrider.tensor_plane.writer import PlaneWriter, PlaneWriters

MAX_CONNECTIONS = 64
"""Bound on the planes of one link; a ring of each takes memory."""
_ANYWHERE = ("0.0.0.0", "::", "")


class TargetPlanes:
    """Connections to drafts, by link and number. Commands and ``writer`` come from one thread."""

    def __init__(self, device: torch.device, kinds: Sequence[PlaneKind], *, host: str = "127.0.0.1") -> None:
        """``kinds`` may be used; ``host`` is the address of the service, which drafts reach."""
        self._device, self._kinds = device, tuple(kinds)
        self._host = "127.0.0.1" if host.startswith("unix:") else bare_host(host)
        self._writers: PlaneWriters | None = None
        self._offers: dict[tuple[int, int], PlaneOffer] = {}
        self._closing_threads: list[threading.Thread] = []
        self.sent_bytes: Counter[str] = Counter(dict.fromkeys((*kinds, PlaneKind.INLINE), 0))
        """Hidden states handed over, by kind of plane."""

    def handle(self, link_id: int, command: PlaneCommand, tell: Callable[[PlaneEvent], None]) -> None:
        """Offer a plane, or end a connection."""
        key = link_id, command.connection
        if isinstance(command, ClosePlane):
            self._end([key])
        elif isinstance(command, RequestPlane):
            try:
                tell(OfferPlane(command.connection, self._offer(key, tell)))
            except OSError as error:
                tell(refusal(command.connection, f"the target makes no offer at {self._host}: {error}"))

    def writer(self, link_id: int, connection: int) -> PlaneWriter | None:
        """Writer of tensors for a connection's draft; None: inline."""
        offer = self._offers.get((link_id, connection)) if connection else None
        writer = None if offer is None or self._writers is None else self._writers.writer(offer.offer_id)
        return None if writer is None or writer.report.kind is PlaneKind.INLINE else writer

    def drop_link(self, link_id: int) -> None:
        """End the connections of a link; in a thread, since transfers under way are waited for."""
        self._end([key for key in self._offers if key[0] == link_id])

    def readings(self) -> list[Reading]:
        """Bytes by kind of plane."""
        return each("outrider_hidden_state_bytes_total", "plane", sorted(self.sent_bytes.items()))

    def close(self) -> None:
        """End all connections; idempotent."""
        self._offers.clear()
        if self._writers is not None:
            self._writers.close()
        for closing in self._closing_threads:
            closing.join()

    def _offer(self, key: tuple[int, int], tell: Callable[[PlaneEvent], None]) -> PlaneOffer:
        """A new offer; ``OSError`` where none can be made."""
        link_id, connection = key
        if not self._kinds:
            raise OSError("tensor_plane is inline")
        if key in self._offers or sum(other == link_id for other, _ in self._offers) >= MAX_CONNECTIONS:
            raise OSError(f"connection {connection} is there already, or one of more than {MAX_CONNECTIONS}")
        if self._writers is None:
            from outrider.tensor_plane.writer import PlaneWriters

            self._writers = PlaneWriters(self._device, self._host, kinds=self._kinds)

        def report(chosen: PlaneReport, is_closed: bool) -> None:
            tell(PlaneChosen(connection, chosen, is_closed=is_closed))

        offer = self._offers[key] = self._writers.offer(report)
        host = "" if offer.host in _ANYWHERE else offer.host
        return PlaneOffer(offer.offer_id, offer.token, host, offer.port)

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        writers = self._writers
        ended = [offer for key in keys if (offer := self._offers.pop(key, None)) is not None]
        if writers is None or not ended:
            return

        def withdraw() -> None:
            for offer in ended:
                writers.withdraw(offer)

        self._closing_threads = [closing for closing in self._closing_threads if closing.is_alive()]
        closing = threading.Thread(target=withdraw, name="tensor-plane-end", daemon=True)
        self._closing_threads.append(closing)
        closing.start()
