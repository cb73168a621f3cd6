"""Command line of one service: one flag for each setting of its section, generated from the schema."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from outrider.config.flag_groups import GROUPS, group_of, value_name
from outrider.config.schema import Section
from outrider.config.sources import variable_name
from outrider.config.typed_names import RENAMED, unknown
from outrider.errors import ConfigError

_OF_SERVE = {("gateway", "enabled"), ("gateway", "num_processes"), ("coordinator", "num_processes")}
"""Settings that only ``outrider serve`` reads: taken here, and not in the help."""

_SHORT = {("gateway", "coordinator_address"): "--coordinator"}
"""A shorter name, which the help shows instead of the setting's."""

_AS_SERVE = {("gateway", "port"): "--http-port", ("gateway", "host"): "--http-host"}
"""Names that these flags have in ``outrider serve``; taken here, and not in the help."""

_SEVERAL = {("gateway", "coordinator_address")}
"""Settings that take one value or several, which commas join."""

_MODULES = {
    "target": "outrider_target",
    "draft": "outrider_draft",
    "coordinator": "outrider_coordinator",
    "gateway": "outrider.gateway",
}


def service_module(section: str) -> str:
    """Module that runs the service of a section, for ``python -m``."""
    return _MODULES[section]


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises the errors of ``outrider.errors``."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("", message)


def parse_flags(section: type[Section], argv: Sequence[str] | None = None) -> tuple[dict[str, Any], str | None]:
    """Return the given flags as key -> text, and the path of ``--config``, if given.

    Raises ``ConfigError`` for an unknown flag.
    """
    parser = build_parser(section)
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise _unknown_flag(rest[0], section)
    values = vars(given)
    return {key: _joined(values[key]) for key in section.model_fields if key in values}, values.get("config")


def _joined(value: Any) -> Any:  # noqa: ANN401 - a text, a bool, or texts
    return ",".join(value) if isinstance(value, list) else value


def flag_names_of(section: type[Section], argv: Sequence[str] | None = None) -> dict[str, str]:
    """Setting: its flag as it was typed, else as the help shows it."""
    typed = {text.partition("=")[0] for text in (sys.argv[1:] if argv is None else argv)}
    known = {key: _spellings(section.name, key) for key in section.model_fields}
    return {key: next((name for name in names if name in typed), names[0]) for key, names in known.items()}


def _spellings(section: str, key: str) -> list[str]:
    """The names of a setting's flag, the one that the help shows first."""
    flag = f"--{key.replace('_', '-')}"
    shown = _SHORT.get((section, key), flag)
    former = [f"--{old.replace('_', '-')}" for old, present in RENAMED.items() if present == key]
    return list(dict.fromkeys([shown, flag, _AS_SERVE.get((section, key), flag), *former]))


def build_parser(section: type[Section]) -> argparse.ArgumentParser:
    """Build the parser; flags that are not given set no attribute."""
    parser = _Parser(
        prog=f"outrider {section.name}",
        usage=f"outrider {section.name} [OPTIONS]",
        description=(section.__doc__ or "").replace("``", ""),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings (variable OUTRIDER_CONFIG)")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for key, field in section.model_fields.items():
        _add(groups[group_of(key)], section.name, key, field)
    return parser


def _add(parser: argparse._ArgumentGroup, section: str, key: str, field: FieldInfo) -> None:
    shown, *hidden = _spellings(section, key)
    default = "" if field.is_required() or field.default is None else f" Default {field.default}."
    text = f"{field.description}{default} [{variable_name(section, key)}]".replace("%", "%%")
    text = argparse.SUPPRESS if (section, key) in _OF_SERVE else text
    if field.annotation is bool:
        parser.add_argument(shown, action=argparse.BooleanOptionalAction, help=text)
        return
    many: dict[str, Any] = {"nargs": "+"} if (section, key) in _SEVERAL else {}
    parser.add_argument(shown, dest=key, metavar=value_name(key, field.annotation), help=text, **many)
    for name in hidden:
        parser.add_argument(name, dest=key, help=argparse.SUPPRESS, **many)


def _unknown_flag(text: str, section: type[Section]) -> ConfigError:
    if not text.startswith("--"):
        return ConfigError("", f"{text!r} is no flag; settings are given as --name value")
    key = text[2:].partition("=")[0].replace("-", "_")
    error = str(unknown(key, [*section.model_fields, "config"]))
    return ConfigError("", "--" + error.replace("_", "-").replace("did you mean ", "did you mean --"))
