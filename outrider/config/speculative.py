"""``--speculative-config``: vLLM's keys, translated to settings.

The schema checks the values. The keys are those of vLLM 0.9, which had draft workers, and of 0.33.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.config.typed_names import SettingKey, check_known
from outrider.errors import ConfigError

NAME = "speculative_config"

_EXAMPLE = '{"model": "/models/draft", "num_speculative_tokens": 4}'

KEYS: dict[str, SettingKey] = {
    "method": ("draft", "method"),
    "model": ("draft", "model"),
    "revision": ("draft", "revision"),
    "num_speculative_tokens": ("coordinator", "num_speculative_tokens"),
    "draft_sample_method": ("draft", "draft_sample_method"),
    "draft_tensor_parallel_size": ("draft", "tensor_parallel_size"),
    "acceptance_method": ("coordinator", "acceptance_method"),
    "rejection_sample_method": ("coordinator", "rejection_sample_method"),
    "posterior_threshold": ("coordinator", "posterior_threshold"),
    "posterior_alpha": ("coordinator", "posterior_alpha"),
    "disable_by_batch_size": ("coordinator", "disable_by_batch_size"),
    "prompt_lookup_max": ("draft", "prompt_lookup_max"),
    "prompt_lookup_min": ("draft", "prompt_lookup_min"),
    "suffix_decoding_max_tree_depth": ("draft", "suffix_decoding_max_tree_depth"),
    "suffix_decoding_max_spec_factor": ("draft", "suffix_decoding_max_spec_factor"),
    "suffix_decoding_min_token_prob": ("draft", "suffix_decoding_min_token_prob"),
    "max_model_len": ("draft", "max_model_len"),
    "quantization": ("draft", "quantization"),
    "kv_cache_dtype": ("draft", "kv_cache_dtype"),
    "disable_logprobs": ("coordinator", "disable_logprobs"),
}
"""vLLM's key: our section and key, for values that mean the same."""

_SWITCHES: dict[str, tuple[SettingKey, Any]] = {
    "enforce_eager": (("draft", "cuda_graph_memory_mb"), 0),
    "disable_log_stats": (("coordinator", "log_interval_s"), 0),
}
"""vLLM's switch: what it sets when it is on."""

_WITHOUT_EFFECT = {
    "attention_backend",  # there is one attention kernel
    "code_revision",  # code of a model's repository is never run
    "disable_mqa_scorer",  # all positions are scored in one forward
    "disable_padded_drafter_batch",  # rows of a batch may differ in length
    "enable_chunked_prefill",  # always on
    "moe_backend",
    "use_local_argmax_reduction",
}
"""Keys of how vLLM computes what it computes; any value gives the same output here."""

_OF_VLLM = "tunes how vLLM runs drafts that read hidden states; there is nothing like it here"
_OF_OTHERS = "belongs to a method that is not built yet; see method"
_REFUSED = {
    "disable_eagle_block_drop": _OF_VLLM,
    "disable_lookahead_block_hashes": _OF_VLLM,
    "draft_lm_head_quantization": "a draft's head has the type of its weights: set draft.dtype",
    "draft_load_config": "set draft.load_format instead",
    "draft_model_config": "is vLLM's own, not a user's",
    "draft_parallel_config": "is vLLM's own, not a user's",
    "dspark_draft_topk": _OF_OTHERS,
    "enable_adaptive_verification": "draft lengths follow the measured throughput: draft_length is auto",
    "fly_entropy_threshold": "acceptance is rejection, coupled or typical",
    "fly_entropy_top_k": "acceptance is rejection, coupled or typical",
    "fly_window_size": "acceptance is rejection, coupled or typical",
    "index_share_for_mtp_iteration": _OF_VLLM,
    "num_speculative_tokens_per_batch_size": "draft lengths follow the measured throughput: draft_length is auto",
    "parallel_drafting": "method dflash drafts all tokens at once, other drafts one after the other",
    "speculative_token_tree": "a draft is one sequence of tokens",
    "suffix_decoding_max_cached_requests": "outputs count in tokens: set draft.suffix_decoding_max_cached_tokens",
    "synthetic_acceptance_length": "tokens are never accepted by chance",
    "synthetic_acceptance_rate": "tokens are never accepted by chance",
    "synthetic_acceptance_rates": "tokens are never accepted by chance",
    "target_model_config": "is vLLM's own, not a user's",
    "target_parallel_config": "is vLLM's own, not a user's",
    "tensor_parallel_size": "is the target's here as in vLLM: set draft_tensor_parallel_size",
    "use_heterogeneous_vocab": "draft and target must have the same vocabulary",
    "xpress_topc": _OF_OTHERS,
}
"""vLLM's key: why it is refused. Off (false, or "auto") is as if it were not there."""

_REJECTION_SAMPLE_METHODS = {
    "standard": "standard",
    "strict": "standard",
    "probabilistic": "standard",
    "block": "block",
}


def parse_json(text: str, name: str) -> Mapping[str, Any]:
    """Parse the JSON object of a flag or a variable, which errors call ``name``; ``ConfigError`` for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(name, f"should be a JSON object such as {_EXAMPLE}: {error}") from error
    except RecursionError as error:
        raise ConfigError(name, "is nested too deeply: should be a JSON object of plain values") from error
    return as_mapping(value, name)


def as_mapping(value: object, name: str) -> Mapping[str, Any]:
    """Check a value that is already parsed; ``ConfigError`` for anything but an object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, f"should be an object such as {_EXAMPLE}")
    return value


def translate(config: Mapping[str, Any], name: str) -> dict[SettingKey, Any]:
    """Return (section, key) -> value; ``ConfigError`` for an unsupported key, below the ``name`` that was typed. A null
    counts as unset, as in vLLM.
    """
    taken = [*KEYS, *_SWITCHES]
    check_known(config, [*taken, *_REFUSED, *_WITHOUT_EFFECT], prefix=f"{name}.", suggested=taken)
    given = {key: value for key, value in config.items() if value is not None}
    for key in given.keys() & _REFUSED.keys():
        _refuse(key, given[key], name)
    given = _named_as_here(_one_lookup_is_both(given), name)
    values = {place: given[key] for key, place in KEYS.items() if key in given}
    return values | {place: value for key, (place, value) in _SWITCHES.items() if _is_on(key, given, name)}


def key_of(place: SettingKey) -> str:
    """The key of vLLM that sets a setting."""
    keys = KEYS | {key: set_place for key, (set_place, _) in _SWITCHES.items()}
    return next(key for key, known in keys.items() if known == place)


def _refuse(key: str, value: object, name: str) -> None:
    if value is False or value == "auto":
        return
    raise ConfigError(f"{name}.{key}", f"is not supported; {_REFUSED[key]}")


def _is_on(key: str, given: Mapping[str, Any], name: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}.{key}", f"should be true or false, not {value!r}")
    return value


def _named_as_here(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Names of vLLM's methods as ours; what it names and we have not is refused with the reason."""
    named = dict(config)
    if (method := named.pop("rejection_sample_method", None)) is not None:
        if str(method) not in _REJECTION_SAMPLE_METHODS:
            raise ConfigError(
                f"{name}.rejection_sample_method",
                f"should be standard or block, not {method!r}; see acceptance_method for others",
            )
        named.setdefault("acceptance_method", "rejection")
        named["rejection_sample_method"] = _REJECTION_SAMPLE_METHODS[str(method)]
    if named.get("model") == "[ngram]":  # as vLLM before 0.8 had it
        named["model"] = "ngram"
    return named


def _one_lookup_is_both(config: dict[str, Any]) -> dict[str, Any]:
    """Lookup bounds; if one alone is given, it counts for both, as in vLLM."""
    bounds = ("prompt_lookup_max", "prompt_lookup_min")
    given = [config[key] for key in bounds if key in config]
    return {**config, **dict.fromkeys(bounds, given[0])} if len(given) == 1 else config
