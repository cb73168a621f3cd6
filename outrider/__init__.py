"""Outrider: speculative decoding as gRPC microservices.

Public names are loaded when first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Client
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

__version__ = "0.2.0"

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


_MODULES = {
    "outrider.client": ("AsyncClient", "Client"),
    "outrider.generation": (
        *("Delta", "GenerationResult", "ModelInfo", "SpeculationStats", "StageTimes", "Timing"),
        "Usage",
    ),
    "outrider.tls": ("Tls",),
    "outrider.types": ("AcceptanceMethod", "FinishReason", "TokenLogprob"),
}
_SUBMODULES = ("client", "errors", "generation", "tls", "types")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever was asked for
    if name in _SUBMODULES:
        return importlib.import_module(f"outrider.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "outrider.errors")
    return getattr(importlib.import_module(module), name)
