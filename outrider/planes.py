"""Values of the tensor plane, as they travel between services: offers, references, reports."""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass, field

from outrider.values import step_value

ID_BYTES = 16
"""Size of plane ids and tokens: 128 random bits, which cannot be guessed."""


class PlaneKind(enum.StrEnum):
    """Kinds of transport for the bytes of a tensor, best first where nothing was measured."""

    CUDA_IPC = "cuda_ipc"
    """The writer's device memory, mapped by the reader: one card, or cards that reach each other."""
    NCCL = "nccl"
    """Point to point between two GPUs."""
    SHARED_MEMORY = "shared_memory"
    """POSIX shared memory of one host."""
    GLOO = "gloo"
    """Point to point between two processes through main memory, on any hosts."""
    INLINE = "inline"
    """Data in the message itself, through the coordinator."""


@step_value(frozen=True, slots=True)
class PlaneReference:
    """Bytes that a reader fetches from a plane, once."""

    plane_id: bytes  # [ID_BYTES]
    offset_bytes: int
    """Offset in the plane's ring."""
    num_bytes: int
    sequence: int
    """Names this use of the place; never used again on its plane."""

    def part(self, begin: int, end: int) -> PlaneReference:
        """The bytes from ``begin`` to ``end`` - 1 of these; the place is given back with them."""
        return PlaneReference(self.plane_id, self.offset_bytes + begin, end - begin, self.sequence)


@dataclass(frozen=True, slots=True)
class PlaneOffer:
    """Address and secret of a writer's offer; good for one connection."""

    offer_id: bytes  # [ID_BYTES]
    token: bytes = field(repr=False)  # [ID_BYTES]
    """Secret of the two ends and of the coordinator that introduces them; it is never sent between the two."""
    host: str
    port: int

    @classmethod
    def new(cls, host: str, port: int) -> PlaneOffer:
        """An offer with an id and a token of its own."""
        return cls(secrets.token_bytes(ID_BYTES), secrets.token_bytes(ID_BYTES), host, port)


@dataclass(frozen=True, slots=True)
class PlaneReport:
    """Plane that two services use, and the reasons against others."""

    kind: PlaneKind
    round_trip_ms: float = 0.0
    """Round trip of a probe of 147,456 bytes and its acknowledgement, the quickest of several; 0 for inline."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(another kind, why it is not used)."""

    def text(self) -> str:
        """One line for people."""
        took = f"{self.kind} ({self.round_trip_ms:.2f} ms a probe)" if self.round_trip_ms else str(self.kind)
        return "; ".join([took, *(f"not {kind}: {reason}" for kind, reason in self.reasons)])
