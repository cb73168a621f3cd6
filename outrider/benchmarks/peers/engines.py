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


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of prompts that were generated at the same time."""

    tokens: list[list[int]]
    """New tokens of each prompt."""
    streams_s: list[float] | None = None
    """Seconds between the first and the last token of each; None where the engine does not say, or all end together."""


Generate = Callable[[Sequence[Sequence[int]], int], Generated]
"""(prompts of one length, new tokens) to exactly that number of new tokens of each."""


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
    tensor_parallel_size: int = 1
    """GPUs of the engines that can divide a model."""
    num_users: int = 1
    """Most requests at the same time."""
    load_format: str = "safetensors"
    """Format of the weights; "dummy" (vLLM alone): random weights."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM takes; None: its default."""


def plain(pair: Pair) -> Generate:
    """``transformers.generate`` of the target alone."""
    return _generating(pair, {})


def compiled(pair: Pair) -> Generate:
    """The same over a static cache, which compiles the forward and captures it as a CUDA graph."""
    return _generating(pair, {"cache_implementation": "static"})


def assisted(pair: Pair) -> Generate:
    """Assisted generation: a constant draft length, no confidence threshold, set where they count: on the draft."""
    if pair.num_users > 1:
        raise one_user_error("transformers-assisted")
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
    speculative = {"method": "draft_model", "model": _required(pair.draft), "num_speculative_tokens": pair.draft_length}
    return _vllm(pair, {**speculative, "draft_tensor_parallel_size": pair.tensor_parallel_size})


ENGINES: dict[str, Callable[[Pair], Generate]] = {
    "transformers": plain,
    "transformers-compiled": compiled,
    "transformers-assisted": assisted,
    "vllm": vllm_plain,
    "vllm-speculative": vllm_speculative,
}
NEEDS = {name: name.partition("-")[0] for name in ENGINES}
"""The package that each needs."""
SPECULATIVE = {"transformers-assisted": "transformers", "vllm-speculative": "vllm"}
"""Engines that need a draft, and the engine that each is without it."""
ONE_USER = frozenset({"transformers-assisted"})
"""Engines that take one prompt at a time."""


def num_gpus(engine: str, pair: Pair) -> int | None:
    """GPUs of an engine; None on a CPU."""
    if pair.device == "cpu":
        return None
    return pair.tensor_parallel_size if NEEDS.get(engine) == "vllm" else 1


def one_user_error(engine: str) -> ConfigError:
    """Error for an engine that takes one prompt at a time."""
    return ConfigError("--max-concurrency", f"must be 1 for {engine}, which takes one prompt at a time")


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
    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        ids = torch.tensor([list(prompt) for prompt in prompts], device=pair.device)
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **options)
        return Generated(out[:, ids.shape[1] :].tolist())

    return generate


def _vllm(pair: Pair, speculative: dict[str, Any] | None) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    if pair.device == "cpu" and "vllm.platforms.cuda" in sys.modules:
        raise ConfigError("--device", "this build of vLLM runs on a GPU, not on cpu")
    share = pair.gpu_memory_utilization
    options: dict[str, Any] = {} if share is None else {"gpu_memory_utilization": share}
    if pair.load_format == "dummy":
        options["load_format"] = "dummy"
    engine = LLM(
        model=pair.target,
        dtype=pair.dtype,
        max_model_len=pair.max_length,
        max_num_seqs=pair.num_users,
        tensor_parallel_size=pair.tensor_parallel_size,
        speculative_config=speculative,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # by which each request tells its times
        **options,
    )

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = engine.generate(asked, sampling, use_tqdm=False)
        return Generated([list(answer.outputs[0].token_ids) for answer in answers], _streams_s(answers))

    return generate


def _streams_s(answers: Sequence[Any]) -> list[float] | None:
    """Seconds of each stream of vLLM, by the clock of its engine."""
    times: list[Any] = [getattr(answer, "metrics", None) for answer in answers]
    return None if None in times else [each.last_token_ts - each.first_token_ts for each in times]
