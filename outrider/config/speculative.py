"""``--speculative-config``: the keys that vLLM's users know, as settings of ours.

Owns the translation and nothing else; the bounds of each value are the schema's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.config.suggestions import check_known
from outrider.errors import ConfigError

NAME = "speculative_config"

KEYS: dict[str, tuple[str, str]] = {
    "method": ("draft", "method"),
    "model": ("draft", "model"),
    "num_speculative_tokens": ("coordinator", "num_speculative_tokens"),
    "draft_tensor_parallel_size": ("draft", "tensor_parallel_size"),
    "acceptance_method": ("coordinator", "acceptance_method"),
    "posterior_threshold": ("coordinator", "posterior_threshold"),
    "posterior_alpha": ("coordinator", "posterior_alpha"),
    "disable_by_batch_size": ("coordinator", "disable_by_batch_size"),
    "prompt_lookup_max": ("draft", "prompt_lookup_max"),
    "prompt_lookup_min": ("draft", "prompt_lookup_min"),
    "max_model_len": ("draft", "max_model_len"),
    "disable_logprobs": ("coordinator", "disable_logprobs"),
}
"""vLLM's key: our section and key."""


def parse_json(text: str) -> Mapping[str, Any]:
    """The object a flag or a variable holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(NAME, f"should be a JSON object: {error}") from error
    except RecursionError as error:
        raise ConfigError(NAME, "is nested too deeply: should be a JSON object of plain values") from error
    return as_mapping(value)


def as_mapping(value: object) -> Mapping[str, Any]:
    """The same, already parsed; anything but an object is an error."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(NAME, 'should be an object such as {"model": "/models/draft", "num_speculative_tokens": 4}')
    return value


def translate(config: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """(section, key) -> value. A null counts as unset, as it does in vLLM."""
    check_known(config, KEYS, prefix=f"{NAME}.")
    config = _one_lookup_is_both({key: value for key, value in config.items() if value is not None})
    return {place: config[key] for key, place in KEYS.items() if key in config}


def _one_lookup_is_both(config: dict[str, Any]) -> dict[str, Any]:
    """With only one of the lookup bounds, vLLM takes it for both."""
    bounds = ("prompt_lookup_max", "prompt_lookup_min")
    given = [config[key] for key in bounds if key in config]
    return {**config, **dict.fromkeys(bounds, given[0])} if len(given) == 1 else config
