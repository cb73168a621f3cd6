"""Flags of ``vllm serve`` that ``outrider serve`` has no option for: passed over, or refused with the reason.

The flags are those of vLLM 0.9 and 0.33. The ones that mean the same here are names of the option itself.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from outrider.cli.options import progress

_WITHOUT_EFFECT = {
    "--async-scheduling": "the next step is always prepared while one runs",
    "--disable-log-requests": "requests are not logged one by one at this level",
    "--enable-chunked-prefill": "long prompts are always cut into chunks",
    "--no-enable-log-requests": "requests are not logged one by one at this level",
    "--use-tqdm-on-load": "progress is shown on a terminal",
}
"""Switches of what is so anyway."""

_NO_QUANTIZATION = "weights are served as float32, bfloat16 or float16: leave it out and name such a model"
_ONE_ENGINE = "one target and one draft are served; for more, start `outrider target` on each host"
_NO_LORA = "adapters are not served: merge the adapter into the model"
_TEXT_ONLY = "models of text alone are served"
_NO_TOOLS = "answers are not parsed: tools reach the chat template, and the text comes back as it is"
_NO_OFFLOAD = "weights and KV cache stay on the device"

REFUSED = {
    "--allowed-local-media-path": _TEXT_ONLY,
    "--attention-backend": "there is one attention kernel",
    "--calculate-kv-scales": _NO_QUANTIZATION,
    "--code-revision": "code of a model's repository is never run",
    "--compilation-config": "CUDA graphs follow max_running_requests, -k and cuda_graph_max_tokens (--set)",
    "--cpu-offload-gb": _NO_OFFLOAD,
    "--cudagraph-capture-sizes": "sizes follow from --max-num-seqs and -k: see cuda_graph_max_tokens (--set)",
    "--data-parallel-size": _ONE_ENGINE,
    "-dp": _ONE_ENGINE,
    "--disable-custom-all-reduce": "use --set target.one_shot_all_reduce=false",
    "--disable-sliding-window": "a model's sliding window is part of the model",
    "--distributed-executor-backend": "processes of one model are started by the service itself, or by torchrun",
    "--download-dir": "set HF_HUB_CACHE to the folder",
    "--enable-auto-tool-choice": _NO_TOOLS,
    "--enable-expert-parallel": "models with experts are not served",
    "--enable-lora": _NO_LORA,
    "--enable-reasoning": _NO_TOOLS,
    "--enable-sleep-mode": "a service keeps its memory until it ends",
    "--guided-decoding-backend": "output is not forced into a grammar",
    "--hf-overrides": "edit the model's config.json",
    "--hf-token": "set HF_TOKEN, which other users of this host cannot read",
    "--kv-cache-dtype": "the KV cache has the type of the weights: see --dtype",
    "--kv-transfer-config": "KV caches stay with their service",
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--lora-modules": _NO_LORA,
    "--max-cpu-loras": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--max-num-partial-prefills": "see max_prefill_beside (--set)",
    "--max-seq-len-to-capture": "CUDA graphs cover any length: see cuda_graph_max_tokens (--set)",
    "--nnodes": "start a service's processes on several hosts by torchrun: see docs/operations.md",
    "--num-gpu-blocks-override": "use --set target.num_pages=N",
    "--num-lookahead-slots": "use -k, --num-speculative-tokens",
    "--num-scheduler-steps": "the next step is always prepared while one runs",
    "--otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT",
    "--pipeline-parallel-size": "a model is split by --tensor-parallel-size",
    "-pp": "a model is split by --tensor-parallel-size",
    "--quantization": _NO_QUANTIZATION,
    "-q": _NO_QUANTIZATION,
    "--reasoning-parser": _NO_TOOLS,
    "--rope-scaling": "edit the model's config.json",
    "--rope-theta": "edit the model's config.json",
    "--scheduling-policy": "requests run in the order of their arrival",
    "--seed": "each request has a seed of its own",
    "--skip-tokenizer-init": "the coordinator needs the tokenizer; send prompt_token_ids to pass it by",
    "--speculative-model": "use --draft-model, or --speculative-config",
    "--structured-outputs-config": "output is not forced into a grammar",
    "--swap-space": _NO_OFFLOAD,
    "--tokenizer-mode": "tokenizers are read from tokenizer.json",
    "--tool-call-parser": _NO_TOOLS,
    "--trust-remote-code": "code of a model's repository is never run",
}
"""Flag: the reason."""


class ServeCommand(TyperCommand):
    """A command that knows what vLLM's flags are called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of a library typer brings itself
        """Parse; a flag of vLLM's that is no option here is passed over with a line, or an error with the reason."""
        kept: list[str] = []
        for word in each_name_by_its_flag([_with_hyphens(word) for word in args]):
            flag = word.partition("=")[0]
            if flag in REFUSED:
                raise typer.BadParameter(f"{REFUSED[flag]}.", ctx=ctx, param_hint=flag)
            if flag in _WITHOUT_EFFECT:
                progress.print(f"{flag} has no effect: {_WITHOUT_EFFECT[flag]}", markup=False, style="dim")
            else:
                kept.append(word)
        return list(super().parse_args(ctx, kept))


def _with_hyphens(word: str) -> str:
    """``--max_model_len=8`` as ``--max-model-len=8``: vLLM takes both."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def each_name_by_its_flag(args: list[str]) -> list[str]:
    """``--served-model-name a b``, as vLLM takes it, with the flag before each name.

    The words that follow the first name are names too, unless the target is not named before the flags: then it may be
    one of them.
    """
    flag = "--served-model-name"
    names_target = any(word.partition("=")[0] == "--model" for word in args) or not args[:1] or args[0][:1] != "-"
    written: list[str] = []
    takes_names = False
    for word in args:
        if takes_names and not word.startswith("-"):
            # The flag itself is there for the first name.
            written += [word] if written[-1] == flag else [flag, word]
            takes_names = names_target
        else:
            takes_names = word == flag
            written.append(word)
    return written
