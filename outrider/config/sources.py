"""The three sources of settings, each flattened to (section, key) -> value.

Owns the names of variables, the structure of the file, and the check that every key is known. A source may contain a
``speculative_config``; if it and a plain setting of the same source give a key different values, that is an error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.config import speculative
from outrider.config.client import CLIENT_VARIABLES
from outrider.config.schema import SECTIONS
from outrider.config.typed_names import RENAMED, SettingKey, check_known, unknown
from outrider.errors import ConfigError, install_command

PREFIX = "OUTRIDER_"
CONFIG = f"{PREFIX}CONFIG"
"""Variable that names a file of settings."""
_SPECULATIVE = f"{PREFIX}{speculative.NAME.upper()}"


@dataclass(frozen=True, slots=True)
class SettingSource:
    """The settings of one source."""

    name: str
    values: dict[SettingKey, Any]
    origins: dict[SettingKey, str] = field(default_factory=dict)
    """Origins of single values that have a better name than the source's."""
    names: dict[SettingKey, str] = field(default_factory=dict)
    """Names of settings in errors: the flag, the variable, or the file and the key."""


@dataclass(frozen=True, slots=True)
class FlagNames:
    """Names of a command line's flags in errors."""

    settings: Mapping[SettingKey, str] = field(default_factory=dict)
    """Text of a setting that was given as it was typed, or the flag that would set it."""
    speculative_config: str = speculative.NAME


def variable_name(section: str, key: str) -> str:
    """The name of the environment variable of a setting."""
    return f"{PREFIX}{section}_{key}".upper()


def read_flags(flags: Mapping[SettingKey, Any], speculative_config: str | None, flag_names: FlagNames) -> SettingSource:
    """The settings of the command line; None is unset."""
    plain = {place: value for place, value in flags.items() if value is not None}
    of_config = flag_names.speculative_config
    config = speculative.parse_json(speculative_config, of_config) if speculative_config else {}
    names = {place: name for place, name in flag_names.settings.items() if place in plain}
    values = _with_speculative(plain, config, names, of_config)
    return SettingSource("flag", values, names=names | _speculative_names(values, plain, of_config))


def read_environment(environ: Mapping[str, str]) -> SettingSource:
    """Every ``OUTRIDER_*`` variable; an empty one counts as unset, an unknown one is a ``ConfigError``."""
    present = {(name, key): (name, key) for name, section in SECTIONS.items() for key in section.model_fields}
    former = {(name, old): (name, key) for name, key in present for old in RENAMED if RENAMED[old] == key}
    known = {variable_name(*typed): place for typed, place in (former | present).items()}
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    given = {name: value for name, value in given.items() if not _is_service_link(name, value)}
    given = {name: value for name, value in given.items() if name not in CLIENT_VARIABLES}
    config = speculative.parse_json(given.pop(_SPECULATIVE, "{}"), _SPECULATIVE)
    given.pop(CONFIG, None)
    for name in given:
        if name not in known:
            raise _unknown_variable(name, [*known, CONFIG, _SPECULATIVE])
    names = {known[name]: name for name in given}
    plain = {place: given[name] for place, name in names.items()}
    values = _with_speculative(plain, config, names, _SPECULATIVE)
    origins = {place: names.get(place, _SPECULATIVE) for place in values}
    return SettingSource("environment", values, origins, names | _speculative_names(values, plain, _SPECULATIVE))


def read_file(path: str, named_by: str = "--config") -> SettingSource:
    """A YAML file: sections by name, with their keys below them. ``named_by``: the flag or variable that names it."""
    content = _parse_yaml(Path(path), named_by)
    with _named_with(path):
        check_known(content, [*SECTIONS, speculative.NAME])
        plain = {
            (name, key): value for name in SECTIONS for key, value in _section_items(content.get(name) or {}, name)
        }
        config = speculative.as_mapping(content.get(speculative.NAME) or {}, speculative.NAME)
        names = {place: ".".join(place) for place in plain}
        values = _with_speculative(plain, config, names, speculative.NAME)
    names |= _speculative_names(values, plain, speculative.NAME)
    return SettingSource(path, values, names={place: f"{path}: {name}" for place, name in names.items()})


@contextlib.contextmanager
def _named_with(path: str) -> Iterator[None]:
    """Name the file before the key in errors of its content."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.problem) from error


def _speculative_names(values: Iterable[SettingKey], plain: Collection[SettingKey], name: str) -> dict[SettingKey, str]:
    """Setting: vLLM's key that gave it, below the ``name`` of the ``speculative_config``."""
    return {place: f"{name}.{speculative.key_of(place)}" for place in values if place not in plain}


def _parse_yaml(path: Path, named_by: str) -> Mapping[str, Any]:
    try:
        import yaml  # not of the base install, for its size
    except ModuleNotFoundError as error:
        raise ConfigError(
            named_by, f"{path} cannot be read without PyYAML: pip install pyyaml, or {install_command('coordinator')}"
        ) from error
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:  # a NUL in the path, or bytes that are no UTF-8
        raise ConfigError(named_by, f"{str(path)!r} cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(named_by, f"{path} cannot be read: {error.strerror}") from error
    try:
        content = yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(named_by, f"{path} is nested too deeply: settings are at most two levels deep") from error
    except yaml.YAMLError as error:
        raise ConfigError(named_by, f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(named_by, f"{path} should hold sections by name ({', '.join(SECTIONS)})")
    return {str(key): value for key, value in content.items()}


def _section_items(content: object, name: str) -> list[tuple[str, Any]]:
    if not isinstance(content, Mapping):
        raise ConfigError(name, "should hold settings by name")
    items = [(RENAMED.get(str(key), str(key)), value) for key, value in content.items()]
    check_known([key for key, _ in items], SECTIONS[name].model_fields, prefix=f"{name}.")
    return items


def _is_service_link(name: str, value: str) -> bool:
    """True if Kubernetes made this variable for a Service that happens to be called outrider-something."""
    return value.startswith(("tcp://", "udp://")) or re.search(r"_(SERVICE_(HOST|PORT)|PORT_\d+_)", name) is not None


def _unknown_variable(name: str, known: list[str]) -> ConfigError:
    # Compared without the prefix, which all names share and which would make any two of them look near.
    error = unknown(name.removeprefix(PREFIX).lower(), [item.removeprefix(PREFIX).lower() for item in known])
    nearest = str(error).partition("did you mean ")[2].rstrip("?")
    hint = f"did you mean {PREFIX}{nearest.upper()}?" if nearest else "see docs/configuration.md for those that are"
    return ConfigError(name, f"is not a setting; {hint}")


def _with_speculative(
    plain: dict[SettingKey, Any], config: Mapping[str, Any], names: Mapping[SettingKey, str], name: str
) -> dict[SettingKey, Any]:
    """The settings with those of a ``speculative_config`` that errors call ``name``; ``names`` are the others'."""
    translated = speculative.translate(config, name)
    for place, value in translated.items():
        if place in plain and str(plain[place]) != str(value):
            raise ConfigError(
                names.get(place, ".".join(place)),
                f"is {plain[place]!r} here and {value!r} in {name}; one of them should go",
            )
    return {**translated, **plain}
