"""Options of ``outrider serve`` as settings, and the flag of each setting for errors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from outrider.addresses import MAX_PORT
from outrider.cli.compatibility.table import SETTING_SWITCHES, SETTINGS
from outrider.cli.typed import Typed
from outrider.config.schema import SECTIONS
from outrider.config.sources import FlagNames
from outrider.config.typed_names import SettingKey
from outrider.errors import ConfigError

_SETTING_KEYS = {
    "revision": "target.revision",
    "max_model_len": "target.max_model_len",
    "tensor_parallel_size": "target.tensor_parallel_size",
    "kv_cache_bytes": "target.kv_cache_bytes",
    "device": "target.device draft.device",
    "dtype": "target.dtype draft.dtype",
    "batch_invariant": "target.batch_invariant",
    "kv_cache_dtype": "target.kv_cache_dtype draft.kv_cache_dtype",
    "quantization": "target.quantization draft.quantization",
    "model_impl": "target.model_impl draft.model_impl",
    "load_format": "target.load_format draft.load_format",
    "page_size": "target.page_size draft.page_size",
    "prefix_caching": "target.prefix_caching draft.prefix_caching",
    "max_batched_tokens": "target.max_batched_tokens draft.max_batched_tokens",
    "num_threads": "target.num_threads draft.num_threads",
    "draft_model": "draft.model",
    "draft_revision": "draft.revision",
    "draft_device": "draft.device",
    "draft_dtype": "draft.dtype",
    "draft_quantization": "draft.quantization",
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

_DERIVED = {
    "gpu_memory_utilization": "target.gpu_memory_utilization draft.gpu_memory_utilization",
    "metrics_port": "coordinator.metrics_port",
    "served_model_name": "target.served_model_name",
}
"""Option: settings that follow from its value, and are named by its flag."""

_METRICS_ORDER = ("coordinator", "target", "draft")
_TARGET_MODEL = ("target", "model")
MODEL = "MODEL"
"""The argument that names the target."""

Options = Mapping[str, Any]
"""Values of the options by their Python names; None: not given."""


def settings_of(options: Options) -> dict[SettingKey, Any]:
    """(section, key) -> value of the options that were given."""
    return {place: value for _, place, value in _set(options)}


def flag_names(options: Options, typed: Typed, given_keys: Collection[SettingKey]) -> FlagNames:
    """Names of settings: as typed, the strongest last; for a default, the flag that would set it."""
    names = {
        (section, key): f"--set {section}.{key}" for section, known in SECTIONS.items() for key in known.model_fields
    }
    names |= {place: flag for flag, keys in _VLLM_FLAGS.items() for place in keys}
    named = {**_DERIVED, **_SETTING_KEYS}
    names |= {place: typed.spelling(option) for option, keys in named.items() for place in _keys(keys)}
    names |= {_TARGET_MODEL: "--model" if "--model" in typed.flags else MODEL}
    names |= {place: typed.spelling(option) for option, place, _ in _set(options)}
    names |= {place: f"--set {'.'.join(place)}" for place in given_keys}
    names |= {place: flag for flag in typed.flags for place in _VLLM_FLAGS.get(flag, ())}
    return FlagNames(names, typed.spelling("speculative_config"))


def _keys(text: str) -> list[SettingKey]:
    """Settings of a table's entry; a value may follow each."""
    return [(section, key) for each in text.split() for section, _, key in [each.partition("=")[0].partition(".")]]


_VLLM_FLAGS = {flag: _keys(text) for flag, text in {**SETTINGS, **SETTING_SWITCHES}.items()}
"""Flag of vLLM's that is no option: its settings."""


def _set(options: Options) -> Iterator[tuple[str, SettingKey, Any]]:
    """(option, setting, value) of each setting that the options set."""
    for option, keys in _SETTING_KEYS.items():
        for place in _keys(keys) if options.get(option) is not None else ():
            yield option, place, options[option]
    yield from _of_names(options.get("served_model_name"))
    yield from _of_metrics(options.get("metrics_port"))
    for section in ("target", "draft") if options.get("enforce_eager") else ():
        yield "enforce_eager", (section, "cuda_graph_memory_mb"), 0
    for section in _METRICS_ORDER if options.get("disable_log_stats") else ():
        yield "disable_log_stats", (section, "log_interval_s"), 0.0


def _of_metrics(first: int | None) -> Iterator[tuple[str, SettingKey, Any]]:
    """The ports count up from that of the coordinator; ``ConfigError`` for one after which there are too few."""
    if first is None:
        return
    most = MAX_PORT - len(_METRICS_ORDER) + 1
    if not 1 <= first <= most:
        problem = f"should be from 1 to {most}, since target and draft serve theirs at the next two, not {first}"
        raise ConfigError("metrics_port", problem)
    for number, section in enumerate(_METRICS_ORDER):
        yield "metrics_port", (section, "metrics_port"), first + number


def _of_names(given: Sequence[str] | None) -> Iterator[tuple[str, SettingKey, Any]]:
    """The target is called by the first name; requests over HTTP may use any."""
    names = [name.strip() for part in given or () for name in part.split(",") if name.strip()]
    if names:
        yield "served_model_name", ("target", "served_model_name"), names[0]
    if names[1:]:
        yield "served_model_name", ("gateway", "served_model_name"), ",".join(names)
