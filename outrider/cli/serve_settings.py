"""Options of ``outrider serve`` as settings, and errors of settings under the names that were typed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cli.compatibility.table import SETTING_SWITCHES, SETTINGS
from outrider.cli.stack.plan import Place
from outrider.config import speculative
from outrider.config.sources import PREFIX
from outrider.errors import ConfigError

_PLACES = {
    "revision": "target.revision",
    "max_model_len": "target.max_model_len",
    "tensor_parallel_size": "target.tensor_parallel_size",
    "kv_cache_bytes": "target.kv_cache_bytes",
    "device": "target.device draft.device",
    "dtype": "target.dtype draft.dtype",
    "load_format": "target.load_format draft.load_format",
    "page_size": "target.page_size draft.page_size",
    "prefix_caching": "target.prefix_caching draft.prefix_caching",
    "max_batched_tokens": "target.max_batched_tokens draft.max_batched_tokens",
    "num_threads": "target.num_threads draft.num_threads",
    "draft_model": "draft.model",
    "draft_revision": "draft.revision",
    "draft_device": "draft.device",
    "draft_dtype": "draft.dtype",
    "draft_tensor_parallel_size": "draft.tensor_parallel_size",
    "method": "draft.method",
    "num_speculative_tokens": "coordinator.num_speculative_tokens",
    "acceptance_method": "coordinator.acceptance_method",
    "disable_by_batch_size": "coordinator.disable_by_batch_size",
    "host": "coordinator.host",
    "port": "coordinator.port",
    "tokenizer": "coordinator.tokenizer",
    "tokenizer_revision": "coordinator.tokenizer_revision",
    "chat_template": "coordinator.chat_template",
    "generation_config": "coordinator.generation_config",
    "max_running_requests": "coordinator.max_running_requests",
    "max_logprobs": "coordinator.max_logprobs",
    "num_coordinators": "coordinator.num_processes",
    "api_token_file": "coordinator.api_token_file",
    "log_level": "target.log_level draft.log_level coordinator.log_level",
    "http": "gateway.enabled",
    "http_port": "gateway.port",
}
"""Option: the settings that take its value as it is. The draft's own come after those of both models."""

_FLAG = "flag"
"""Origin of what the command line gives."""
_METRICS_ORDER = ("coordinator", "target", "draft")
_MODEL = "target.model"

Options = Mapping[str, Any]
"""Values of the options by their Python names; None: not given."""


@dataclass(frozen=True, slots=True)
class Typed:
    """The flags of a command line, as they were spelled."""

    flags: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each option."""

    def spelling(self, option: str) -> str:
        """The name under which an option was given."""
        names = self.names.get(option, (f"--{option.replace('_', '-')}",))
        return next((name for name in names if name in self.flags), names[0])


def settings_of(options: Options) -> dict[Place, Any]:
    """(section, key) -> value of the options that were given."""
    return {place: value for _, place, value in _set(options)}


@contextlib.contextmanager
def named_as_typed(
    options: Options, typed: Typed, set_places: Collection[Place], speculative_config: str | None
) -> Iterator[None]:
    """Name the flag, or the key of the speculative config, in errors of settings."""
    try:
        yield
    except ConfigError as error:
        if error.field == _MODEL and error.problem == "must be set":
            raise ConfigError("", "a model is needed: outrider serve MODEL (a folder or a Hub id)") from error
        names = _names(options, typed, set_places, speculative_config)
        if error.field not in names:
            raise
        raise ConfigError(names[error.field], error.problem) from error


@contextlib.contextmanager
def named_by_origin(origins: Mapping[Place, str]) -> Iterator[None]:
    """Name the variable, or the file and its key, in errors of settings that were not given on the command line."""
    try:
        yield
    except ConfigError as error:
        section, _, key = error.field.partition(".")
        origin = origins.get((section, key), _FLAG)
        if origin == _FLAG:
            raise
        name = origin if origin.startswith(PREFIX) else f"{origin}: {error.field}"
        raise ConfigError(name, error.problem) from error


def _names(
    options: Options, typed: Typed, set_places: Collection[Place], speculative_config: str | None
) -> dict[str, str]:
    """Setting -> what was typed for it, the strongest last; for a default, the flag that would set it."""
    names = {place: typed.spelling(option) for option, places in _PLACES.items() for place in places.split()}
    with contextlib.suppress(ConfigError):
        keys = speculative.parse_json(speculative_config) if speculative_config else {}
        names |= {
            ".".join(speculative.KEYS[key]): f"{speculative.NAME}.{key}" for key in speculative.KEYS if key in keys
        }
    names |= {".".join(place): typed.spelling(option) for option, place, _ in _set(options)}
    names = {name: text for name, text in names.items() if tuple(name.split(".")) not in set_places}
    for flag in typed.flags:
        for setting in (SETTINGS.get(flag) or SETTING_SWITCHES.get(flag, "")).split():
            names[setting.partition("=")[0]] = flag
    return names


def _set(options: Options) -> Iterator[tuple[str, Place, Any]]:
    """(option, setting, value) of each setting that the options set."""
    for option, places in _PLACES.items():
        for place in places.split() if options.get(option) is not None else ():
            section, _, key = place.partition(".")
            yield option, (section, key), options[option]
    yield from _of_names(options.get("served_model_name"))
    for section in ("target", "draft") if options.get("enforce_eager") else ():
        yield "enforce_eager", (section, "cuda_graph_memory_mb"), 0
    for number, section in enumerate(_METRICS_ORDER):
        if options.get("disable_log_stats"):
            yield "disable_log_stats", (section, "log_interval_s"), 0.0
        if (first := options.get("metrics_port")) is not None:
            yield "metrics_port", (section, "metrics_port"), first + number


def _of_names(given: Sequence[str] | None) -> Iterator[tuple[str, Place, Any]]:
    """The target is called by the first name; requests over HTTP may use any."""
    names = [name.strip() for part in given or () for name in part.split(",") if name.strip()]
    if names:
        yield "served_model_name", ("target", "served_model_name"), names[0]
    if names[1:]:
        yield "served_model_name", ("gateway", "served_model_name"), ",".join(names)
