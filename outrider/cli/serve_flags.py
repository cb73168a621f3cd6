"""Flags of ``outrider serve``, by the panels of its help."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from outrider.cli.compatibility.spellings import whole_number
from outrider.cli.settings_flags import SpeculativeConfig


def _flag(panel: str, text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401 - typer's own type
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, **more)


def _number(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_NUMBER: dict[str, Any] = {"parser": _number, "metavar": "INTEGER"}
"""Number; 4k and 4K are accepted."""

_model, _speculation, _gpus, _serving = (
    partial(_flag, panel) for panel in ("Models", "Speculation", "Devices and memory", "Serving")
)
_METHOD = (
    "How to draft: draft_model, ngram, suffix, none, a head (eagle, eagle3, mtp, dflash, medusa, mlp_speculator) or a"
    " proposer of your own (module:Class)."
)


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Models and their weights."""

    model: Annotated[str | None, _model("Target model, as an option.", "--model")] = None
    revision: Annotated[
        str | None, _model("Branch, tag or commit of the target on the Hub. Default main.", "--revision")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _model(
            "Model names that requests may use; the first is in responses, metrics and traces. Default: the id or the"
            " folder's name.",
            "--served-model-name",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, _model("Tokenizer that replaces the target's: a folder or an id on the Hub.", "--tokenizer")
    ] = None
    tokenizer_revision: Annotated[
        str | None, _model("Branch, tag or commit of the tokenizer on the Hub. Default main.", "--tokenizer-revision")
    ] = None
    chat_template: Annotated[
        str | None, _model("File with a chat template (Jinja) that replaces the model's.", "--chat-template")
    ] = None
    load_format: Annotated[
        str | None, _model("safetensors, dummy (random weights) or synthetic (from a recipe).", "--load-format")
    ] = None
    dtype: Annotated[str | None, _model("auto, float32, bfloat16 or float16, for both models.", "--dtype")] = None
    draft_dtype: Annotated[str | None, _model("Type of the draft, if different.", "--draft-dtype")] = None
    quantization: Annotated[
        str | None,
        _model(
            "fp8: weights of 16 bits become FP8 while loading, for both models. Default none.", "--quantization", "-q"
        ),
    ] = None
    draft_quantization: Annotated[
        str | None, _model("The same of the draft, if different.", "--draft-quantization")
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _model(
            "auto, model or fp8: type of keys and values in the cache, for both models. Default auto.",
            "--kv-cache-dtype",
        ),
    ] = None
    model_impl: Annotated[
        str | None,
        _model(
            "auto, native or transformers: whose code computes both models. Default auto: ours where there is some.",
            "--model-impl",
        ),
    ] = None
    batch_invariant: Annotated[
        str | None,
        _model(
            "auto, on or off: same bits of the target's logits in any batch. Default off; auto: where it is cheap.",
            "--batch-invariant",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        _model(
            "Maximum length of prompt and output together, in tokens. Default: the model's.",
            "--max-model-len",
            **_NUMBER,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SpeculationFlags:
    """Drafting of tokens."""

    draft_model: Annotated[
        str | None,
        _speculation(
            "Draft model: a folder or an id. Without one there is no speculation.", "--draft-model", "--spec-model"
        ),
    ] = None
    draft_revision: Annotated[
        str | None, _speculation("Branch, tag or commit of the draft on the Hub. Default main.", "--draft-revision")
    ] = None
    method: Annotated[str | None, _speculation(_METHOD, "--method", "--spec-method")] = None
    num_speculative_tokens: Annotated[
        int | None,
        _speculation(
            "Maximum number of draft tokens per step. Default 8.", "--num-speculative-tokens", "--spec-tokens", "-k"
        ),
    ] = None
    acceptance_method: Annotated[
        str | None, _speculation("rejection, coupled or typical. Default rejection.", "--acceptance-method")
    ] = None
    disable_by_batch_size: Annotated[
        int | None,
        _speculation("Number of running or waiting requests from which speculation is off.", "--disable-by-batch-size"),
    ] = None
    speculative_config: SpeculativeConfig = None


@dataclass(frozen=True, slots=True)
class DeviceFlags:
    """Devices, memory and threads."""

    device: Annotated[str | None, _gpus("auto, cpu, cuda or cuda:N, for both models. Default auto.", "--device")] = None
    draft_device: Annotated[str | None, _gpus("Device of the draft, if different.", "--draft-device")] = None
    tensor_parallel_size: Annotated[
        int | None, _gpus("Number of GPUs of the target. Default 1.", "--tensor-parallel-size", "-tp")
    ] = None
    draft_tensor_parallel_size: Annotated[
        int | None, _gpus("Number of GPUs of the draft. Default 1.", "--draft-tensor-parallel-size")
    ] = None
    optimize: Annotated[
        str | None,
        _gpus(
            "latency or throughput: choose the arrangement of several GPUs for it: apart, the target over all,"
            " a replica of both models on each, or targets that share a draft. Default: both on one, apart without"
            " room.",
            "--optimize",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _gpus(
            "Fraction of each GPU's memory to use, in (0, 1]; models on one GPU divide it.",
            "--gpu-memory-utilization",
            "--device-memory-utilization",
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        _gpus("Size of the target's KV cache in bytes.", "--kv-cache-bytes", "--kv-cache-memory-bytes", **_NUMBER),
    ] = None
    page_size: Annotated[int | None, _gpus("Tokens in a KV page. Default 16.", "--page-size", "--block-size")] = None
    prefix_caching: Annotated[
        bool | None,
        _gpus(
            "Reuse the KV pages of common prefixes. Default on.",
            "--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = None
    enforce_eager: Annotated[bool, _gpus("Do not use CUDA graphs.", "--enforce-eager")] = False
    num_threads: Annotated[int | None, _gpus("Number of CPU threads of each model.", "--num-threads")] = None


@dataclass(frozen=True, slots=True)
class ServingFlags:
    """Addresses, limits and logs of the services."""

    host: Annotated[str | None, _serving("Address to listen on. Default 127.0.0.1.", "--host")] = None
    port: Annotated[int | None, _serving("Port of the gRPC API. Default 50050.", "--port", "-p")] = None
    http: Annotated[bool | None, _serving("Serve the OpenAI-compatible HTTP API. Default on.", "--http/--no-http")] = (
        None
    )
    http_port: Annotated[int | None, _serving("Port of the HTTP API. Default 8000.", "--http-port")] = None
    api_token_file: Annotated[
        str | None, _serving("File with the API keys, one per line, required for HTTP and gRPC.", "--api-token-file")
    ] = None
    api_key: Annotated[
        list[str] | None,
        _serving("API key, instead of a file; may be repeated. Other users of this host can read it.", "--api-key"),
    ] = None
    generation_config: Annotated[
        str | None,
        _serving(
            "Sampling defaults: auto (the model's generation_config.json) or none (vLLM: vllm). Default auto.",
            "--generation-config",
        ),
    ] = None
    max_running_requests: Annotated[
        int | None,
        _serving("Maximum number of running requests. Default 256.", "--max-running-requests", "--max-num-seqs"),
    ] = None
    num_coordinators: Annotated[
        int | None,
        _serving(
            "Coordinator processes on one port, at most 64; they share no limits. Default 1.", "--num-coordinators"
        ),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        _serving(
            "Maximum number of tokens in a forward. Default 4096 on a GPU, 1024 on a CPU.",
            "--max-batched-tokens",
            "--max-num-batched-tokens",
            **_NUMBER,
        ),
    ] = None
    max_logprobs: Annotated[
        int | None, _serving("Maximum number of logprobs per position. Default 20.", "--max-logprobs")
    ] = None
    metrics_port: Annotated[
        int | None,
        _serving("Port of the coordinator's metrics; the target and the draft use the next two.", "--metrics-port"),
    ] = None
    log_level: Annotated[str | None, _serving("debug, info, warning or error.", "--log-level")] = None
    disable_log_stats: Annotated[bool, _serving("Do not log throughput while requests run.", "--disable-log-stats")] = (
        False
    )
