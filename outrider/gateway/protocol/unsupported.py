"""Fields of vLLM that Outrider does not support: refused if ignoring them would change the output."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from outrider.errors import InvalidRequestError

_NO_MEDIA = "is not supported: only text is read and written"

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_beam_search": ((False,), "is not supported: tokens are sampled"),
    "length_penalty": ((1.0,), "is not supported: it is a field of beam search"),
    "functions": ((), "is not supported: send tools"),
    "function_call": (("none", "auto"), "is not supported: calls of functions are not enforced"),
    "logits_processors": (([],), "is not supported"),
    "logprob_token_ids": (([],), "is not supported: logprobs are of the likeliest tokens"),
    "prompt_embeds": (([],), "is not supported: send text or token ids"),
    "suffix": (("",), "is not supported: text is only continued"),
    "spaces_between_special_tokens": ((True,), "is not supported: the tokenizer decides"),
    "guided_whitespace_pattern": ((), "is not supported: blanks between two parts of JSON are at most 32"),
    "repetition_detection": ((), "is not supported"),
    "thinking_token_budget": ((-1,), "is not supported"),
    "kv_transfer_params": ((), "is not supported: prompts and output are computed by one target"),
    "ec_transfer_params": ((), "is not supported: prompts and output are computed by one target"),
    "modalities": ((["text"],), _NO_MEDIA),
    "audio": ((), _NO_MEDIA),
    "media_io_kwargs": ((), _NO_MEDIA),
    "mm_processor_kwargs": ((), _NO_MEDIA),
    "web_search_options": ((), "is not supported"),
    "return_assistant_tokens_mask": ((False,), "is not supported"),
    "return_weight_versions": ((False,), "is not supported: weights do not change while they are served"),
    "watermarking": ((False,), "is not supported: tokens are drawn without a watermark"),
}
"""Field -> (values that ask for nothing besides null, why any other is refused)."""


IGNORED = frozenset(
    (
        *("stream_interval", "session_id", "mm_payload", "return_mm_kwargs", "routed_experts_prompt_start", "user"),
        *("return_prompt_text", "return_token_offsets", "vllm_xargs", "metadata", "store", "service_tier"),
        *("prediction", "max_completion_tokens", "best_of", "safety_identifier", "prompt_cache_key", "verbosity"),
        *("prompt_cache_retention", "max_tool_calls"),
    )
)
"""Fields of clients that have no effect."""
_MIN_SIMILARITY_RATIO = 0.8
"""Similarity from which a known field is suggested; 1 is equality."""
_MOST_COMPARED, _MOST_CHARACTERS = 8, 40


def find_misspelled(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Unknown names, and the known one that each resembles; names without such a one are left out."""
    unknown = [name for name in names if name not in known and name not in REFUSED and name not in IGNORED]
    near = {
        name: difflib.get_close_matches(name.lower(), known, n=1, cutoff=_MIN_SIMILARITY_RATIO)
        for name in unknown[:_MOST_COMPARED]
        if len(name) <= _MOST_CHARACTERS
    }
    return {name: found[0] for name, found in near.items() if found}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for the first unsupported field with an effect."""
    for name in body.keys() & REFUSED.keys():
        harmless, reason = REFUSED[name]
        if body[name] is not None and body[name] not in harmless:
            raise InvalidRequestError(name, reason)
    _check_best_of(body)


def _check_best_of(body: Mapping[str, Any]) -> None:
    if body.get("best_of") is not None and body["best_of"] != (body.get("n") or 1):
        raise InvalidRequestError("best_of", "must equal n: choices are not ranked")
