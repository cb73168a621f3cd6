"""Loading of settings: flags override the environment, which overrides the file, which overrides the defaults.

Owns the precedence, and how an error names the source. Each source is flattened to (section, key) -> value, the sources
are merged, and the schema checks the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from outrider.config.flags import flag_names_of, parse_flags
from outrider.config.schema import (
    CoordinatorSettings,
    DraftSettings,
    GatewaySettings,
    Section,
    Settings,
    TargetSettings,
)
from outrider.config.sources import CONFIG, FlagNames, SettingSource, read_environment, read_file, read_flags
from outrider.config.typed_names import SettingKey, TypedNames
from outrider.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


UNSET = "must be set"
"""Problem of a setting that has no default and no value."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings, and the source of each value that is not the default."""

    settings: Settings
    origins: dict[SettingKey, str]
    """(section, key) -> "flag", a variable's name or a file's path."""
    names: TypedNames = field(default_factory=TypedNames)
    """Names for errors that come later."""


def load(
    section: type[SectionT], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> SectionT:
    """Load the settings of one process; ``ConfigError`` names the invalid setting as it was typed. ``--help`` prints
    and exits.
    """
    return load_named(section, argv, environ)[0]


def load_named(
    section: type[SectionT], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[SectionT, TypedNames]:
    """Settings as by ``load``, with the names for errors that come later."""
    flags, config = parse_flags(section, argv)
    flag_names = FlagNames({(section.name, key): name for key, name in flag_names_of(section, argv).items()})
    sources = _sources({(section.name, key): value for key, value in flags.items()}, None, config, environ, flag_names)
    names = TypedNames(_typed_names(sources, flag_names), section.name)
    values, _ = merge(sources)
    with names.in_errors():
        return _validate(section, values), names


def _typed_names(sources: Sequence[SettingSource], flags: FlagNames) -> dict[SettingKey, str]:
    """Setting: its name in the strongest source that gives it; that of its flag for what no source gives."""
    given = {place: source.names.get(place, ".".join(place)) for source in sources for place in source.values}
    return {**flags.settings, **given}


def load_all(
    flags: Mapping[SettingKey, Any],
    *,
    speculative_config: str | None = None,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
    flag_names: FlagNames | None = None,
) -> Effective:
    """Load all sections. ``flags`` holds the settings of the command line: (section, key) -> value.

    ``ConfigError`` names a variable or the key of a file as it was typed, and a setting of ``flags`` by
    ``flag_names``, as section.key without one.
    """
    flag_names = FlagNames() if flag_names is None else flag_names
    with TypedNames(flag_names.settings).in_errors():
        sources = _sources(flags, speculative_config, config, environ, flag_names)
    names = TypedNames(_typed_names(sources, flag_names))
    values, origins = merge(sources)
    with names.in_errors():
        settings = Settings(
            target=_validate(TargetSettings, values),
            draft=_validate(DraftSettings, values),
            coordinator=_validate(CoordinatorSettings, values),
            gateway=_validate(GatewaySettings, values),
        )
    return Effective(settings, origins, names)


def merge(sources: Sequence[SettingSource]) -> tuple[dict[str, dict[str, Any]], dict[SettingKey, str]]:
    """Merge the sources, weakest first, into section -> key -> value, with the origin of each value."""
    values: dict[str, dict[str, Any]] = {}
    origins: dict[SettingKey, str] = {}
    for source in sources:
        for (section, key), value in source.values.items():
            values.setdefault(section, {})[key] = value
            origins[section, key] = source.origins.get((section, key), source.name)
    return values, origins


def _sources(
    flags: Mapping[SettingKey, Any],
    speculative_config: str | None,
    config: str | None,
    environ: Mapping[str, str] | None,
    flag_names: FlagNames,
) -> list[SettingSource]:
    environ = os.environ if environ is None else environ
    environment = read_environment(environ)
    path = config or environ.get(CONFIG)
    file = [read_file(path, "--config" if config else CONFIG)] if path else []
    return [*file, environment, read_flags(flags, speculative_config, flag_names)]


def _validate(section: type[SectionT], values: Mapping[str, Mapping[str, Any]]) -> SectionT:
    try:
        return section.model_validate(dict(values.get(section.name, {})))
    except ValidationError as error:
        raise _as_config_error(error, f"{section.name}.") from error


def _as_config_error(error: ValidationError, prefix: str) -> ConfigError:
    first = error.errors()[0]
    # A union's own branches ("int", "none") follow the key in the location; the key is what a user knows.
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "missing":
        return ConfigError(prefix + key, UNSET)
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = message.partition(", unable to parse")[0]
    if not key:  # said by a validator of the whole section as "key: message"
        key, _, message = message.partition(": ")
        return ConfigError(prefix + key, message)
    return ConfigError(prefix + key, f"{message[0].lower()}{message[1:]}, not {first['input']!r}")
