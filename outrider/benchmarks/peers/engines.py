"""The peers: how each loads a pair and generates greedily. Every one runs in a process of its own.

Owns their settings, each as its own documentation has it for speed. None is a dependency of Outrider: the import says
what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError

Generate = Callable[[Sequence[int], int], list[int]]
"""(prompt, new tokens) to exactly so many new tokens."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Model pair and parameters for a peer."""

    target: str
    draft: str | None
    device: str
    dtype: str
    draft_length: int
    max_length: int
    """Prompt and output of the longest request."""


def plain(pair: Pair) -> Generate:
    """``transformers.generate`` of the target alone."""
    return _generating(pair, {})


def compiled(pair: Pair) -> Generate:
    """The same over a static cache, which compiles the forward and captures it as a CUDA graph."""
    return _generating(pair, {"cache_implementation": "static"})


def assisted(pair: Pair) -> Generate:
    """Assisted generation: a constant draft length, no confidence threshold, set where they count: on the draft."""
    draft = _load(_required(pair.draft), pair)
    draft.generation_config.num_assistant_tokens = pair.draft_length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return _generating(pair, {"assistant_model": draft})


def vllm_plain(pair: Pair) -> Generate:
    """The offline engine of vLLM, the target alone."""
    return _vllm(pair, None)


def vllm_speculative(pair: Pair) -> Generate:
    """The offline engine of vLLM with the draft model."""
    return _vllm(
        pair,
        {"method": "draft_model", "model": _required(pair.draft), "num_speculative_tokens": pair.draft_length},
    )


ENGINES: dict[str, Callable[[Pair], Generate]] = {
    "transformers": plain,
    "transformers-compiled": compiled,
    "transformers-assisted": assisted,
    "vllm": vllm_plain,
    "vllm-speculative": vllm_speculative,
}
NEEDS = {name: name.partition("-")[0] for name in ENGINES}
"""The package that each needs."""


def _required(draft: str | None) -> str:
    if draft is None:
        raise ConfigError("--draft-model", "is needed by a peer that speculates")
    return draft


def _load(folder: str, pair: Pair) -> Any:  # noqa: ANN401 - a transformers model
    import torch
    from transformers import AutoModelForCausalLM

    dtype = "auto" if pair.dtype == "auto" else getattr(torch, pair.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(pair.device).eval()


def _generating(pair: Pair, options: dict[str, Any]) -> Generate:
    import torch

    model = _load(pair.target, pair)

    @torch.inference_mode()
    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)], device=pair.device)
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **options)
        new: list[int] = out[0, len(prompt) :].tolist()
        return new

    return generate


def _vllm(pair: Pair, speculative: dict[str, Any] | None) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    if pair.device == "cpu" and "vllm.platforms.cuda" in sys.modules:
        raise ConfigError("--device", "this build of vLLM runs on a GPU, not on cpu")
    engine = LLM(
        model=pair.target,
        dtype=pair.dtype,
        max_model_len=pair.max_length,
        speculative_config=speculative,
        enable_prefix_caching=False,
    )

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        (answer,) = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    return generate
