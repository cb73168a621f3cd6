"""Flags that carry settings as text: a file, vLLM's speculative config, single settings by name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outrider.config.schema import SECTIONS
from outrider.config.typed_names import RENAMED, SettingKey, check_known
from outrider.errors import ConfigError

SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        "-sc",
        rich_help_panel="Speculation",
        help="JSON in vLLM's keys: method, model, num_speculative_tokens, acceptance_method, ...",
    ),
]
ConfigFile = Annotated[str | None, typer.Option("--config", help="YAML file with settings.")]
SetOptions = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting of `outrider config`; may be repeated."),
]


def parse_set(options: list[str] | None) -> dict[SettingKey, Any]:
    """(section, key) -> text of each ``--set section.key=value``."""
    return dict(_parse_one(option) for option in options or ())


def _parse_one(option: str) -> tuple[SettingKey, str]:
    name, equals, value = option.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot):
        raise ConfigError("--set", f"should be SECTION.KEY=VALUE, not {option!r}")
    check_known([section], SECTIONS, prefix="--set ")
    key = RENAMED.get(key.replace("-", "_"), key.replace("-", "_"))
    check_known([key], SECTIONS[section].model_fields, prefix=f"--set {section}.")
    return (section, key), value
