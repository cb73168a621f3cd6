"""Rows of the settings reference: printed by ``outrider config``, and the source of ``docs/configuration.md``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from outrider.config.loading import Effective
from outrider.config.schema import SECTIONS, Section
from outrider.config.sources import variable_name


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting."""

    section: str
    key: str
    flag: str
    variable: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class EffectiveRow:
    """Value of a setting, and its source."""

    name: str
    value: str
    origin: str


def setting_rows(section: type[Section]) -> list[SettingRow]:
    """Every setting of a section in the order of the schema, those that it shares with another one last."""
    return [_row(section.name, key, section.model_fields[key]) for key in _keys(section)]


def effective_rows(effective: Effective) -> list[EffectiveRow]:
    """Every setting of every section with its effective value."""
    return [
        EffectiveRow(
            name=f"{name}.{key}",
            value=_text(getattr(getattr(effective.settings, name), key)),
            origin=effective.origins.get((name, key), "default"),
        )
        for name, section in SECTIONS.items()
        for key in _keys(section)
    ]


def _keys(section: type[Section]) -> list[str]:
    return sorted(section.model_fields, key=lambda key: key not in section.__annotations__)


def _row(section: str, key: str, field: FieldInfo) -> SettingRow:
    return SettingRow(
        section=section,
        key=key,
        flag=f"--{key.replace('_', '-')}",
        variable=variable_name(section, key),
        default="must be set" if field.is_required() else _text(field.default),
        description=field.description or "",
    )


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)
