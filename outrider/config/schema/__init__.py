"""Schema of the settings: default, unit and meaning of each. ``docs/configuration.md`` is generated from it.

Names contain the units ``_ms``, ``_s`` and ``_bytes``; counts begin with ``num_`` or ``max_``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.config.schema.common import Section
from outrider.config.schema.coordinator import CoordinatorSettings
from outrider.config.schema.draft import DraftSettings
from outrider.config.schema.gateway import GatewaySettings
from outrider.config.schema.target import TargetSettings

__all__ = [
    "SECTIONS",
    "CoordinatorSettings",
    "DraftSettings",
    "GatewaySettings",
    "Section",
    "Settings",
    "TargetSettings",
    "to_argv",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections, as ``outrider serve`` reads them."""

    target: TargetSettings
    draft: DraftSettings
    coordinator: CoordinatorSettings
    gateway: GatewaySettings = field(default_factory=lambda: GatewaySettings.model_validate({}))


SECTIONS: dict[str, type[Section]] = {
    section.name: section for section in (TargetSettings, DraftSettings, CoordinatorSettings, GatewaySettings)
}


def to_argv(section: Section) -> list[str]:
    """Return the flags that reproduce this section; defaults are left out."""
    argv: list[str] = []
    for key, value in section.model_dump(exclude_defaults=True).items():
        if value is not None:
            argv += _flag(key, value)
    return argv


def _flag(key: str, value: object) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value.value if isinstance(value, enum.Enum) else value)]
