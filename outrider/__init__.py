"""Outrider: speculative decoding as gRPC microservices.

``Client`` and ``AsyncClient`` are loaded when first asked for, so that importing a value or an error costs no gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    OutriderError,
    PairMismatchError,
    ProtocolError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.generation import Delta, GenerationResult, ModelInfo, SpeculationStats, StageTimes, Timing, Usage
from outrider.tls import Tls
from outrider.types import AcceptanceMethod, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Client

__version__ = "0.1.0"

__all__ = [
    "AcceptanceMethod",
    "AsyncClient",
    "CapacityError",
    "Client",
    "ConfigError",
    "DeadlineError",
    "Delta",
    "FinishReason",
    "GenerationResult",
    "InvalidRequestError",
    "ModelError",
    "ModelInfo",
    "OutriderError",
    "PairMismatchError",
    "ProtocolError",
    "RequestCancelledError",
    "SpeculationStats",
    "StageTimes",
    "Timing",
    "Tls",
    "TokenLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever was asked for
    if name in ("AsyncClient", "Client"):
        from outrider import client

        return getattr(client, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
