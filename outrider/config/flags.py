"""Command line of one service: one flag for each setting of its section, generated from the schema."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from outrider.config.schema import Section
from outrider.config.sources import variable_name
from outrider.config.suggestions import unknown
from outrider.errors import ConfigError

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
    """Return the given flags as key -> text, and the path of ``--config``, if given."""
    parser = build_parser(section)
    given, rest = parser.parse_known_args(argv)
    if rest:
        raise _unknown_flag(rest[0], section)
    values = vars(given)
    return {key: values[key] for key in section.model_fields if key in values}, values.get("config")


def build_parser(section: type[Section]) -> argparse.ArgumentParser:
    """Build the parser; flags that are not given set no attribute."""
    parser = _Parser(
        prog=f"outrider {section.name}",
        description=section.__doc__,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings (variable OUTRIDER_CONFIG)")
    for key, field in section.model_fields.items():
        _add(parser, section.name, key, field)
    return parser


def _add(parser: argparse.ArgumentParser, section: str, key: str, field: FieldInfo) -> None:
    flag = f"--{key.replace('_', '-')}"
    default = "" if field.is_required() or field.default is None else f" Default {field.default}."
    text = f"{field.description}{default} [{variable_name(section, key)}]".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        parser.add_argument(flag, metavar="VALUE", help=text)


def _unknown_flag(text: str, section: type[Section]) -> ConfigError:
    if not text.startswith("--"):
        return ConfigError("", f"{text!r} is no flag; settings are given as --name value")
    key = text[2:].partition("=")[0].replace("-", "_")
    error = str(unknown(key, [*section.model_fields, "config"]))
    return ConfigError("", "--" + error.replace("_", "-").replace("did you mean ", "did you mean --"))
