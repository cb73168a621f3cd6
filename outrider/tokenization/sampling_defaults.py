"""Request defaults of a model, from its ``generation_config.json``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from outrider.limits import MAX_TOKENS

_log = logging.getLogger(__name__)
GENERATION_CONFIG_FILE = "generation_config.json"

MAX_NEW_TOKENS = "max_new_tokens"
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", MAX_NEW_TOKENS)
"""Fields that vLLM reads from the file."""


def sampling_defaults(files: Mapping[str, bytes]) -> dict[str, float | int]:
    """Name -> value of each default in the file; values that are not numbers are ignored with a warning."""
    try:
        config = json.loads(files.get(GENERATION_CONFIG_FILE, b"{}"))
    except (ValueError, RecursionError):
        return {}
    named = {
        name: config[name] for name in SAMPLING_DEFAULTS if isinstance(config, dict) and config.get(name) is not None
    }
    for name in [name for name, value in named.items() if not _is_valid(name, value)]:
        _log.warning("%s: %s: %r is not used as a default", GENERATION_CONFIG_FILE, name, named.pop(name))
    return named


def _is_valid(name: str, value: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int) and value > MAX_TOKENS:  # no message carries it
        return False
    if name == "top_k":
        return isinstance(value, int) and value >= -1
    if name == MAX_NEW_TOKENS:
        return isinstance(value, int) and value >= 1
    upper = 1.0 if name in ("top_p", "min_p") else float("inf")
    has_zero = name in ("temperature", "min_p")
    return (value >= 0 if has_zero else value > 0) and value <= upper and math.isfinite(value)
