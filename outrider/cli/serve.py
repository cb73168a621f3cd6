"""``outrider serve``: all services on this host, as one command."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import typer

from outrider.cli.compatibility.spellings import whole_number
from outrider.cli.facts import draft_length_text, model_text
from outrider.cli.options import Verbose, output
from outrider.cli.serve_settings import MODEL, flag_names, settings_of
from outrider.cli.settings_flags import ConfigFile, SetOptions, SpeculativeConfig, parse_set
from outrider.cli.stack.arrangement import LOADS, Load
from outrider.cli.stack.plan import StackPlan, inheriting
from outrider.cli.stack.preparation import prepare_stack, require_for_file
from outrider.cli.stack.running import Described, run_until_signal
from outrider.cli.stack.secret import LinkSecret, hold_tokens
from outrider.cli.typed import typed_flags
from outrider.config import UNSET, CoordinatorSettings, Effective, FlagNames, load_all
from outrider.config.typed_names import Place
from outrider.errors import ConfigError
from outrider.generation import ModelPlacement
from outrider.telemetry import guard_output
from outrider.transport.security.tokens import check_token


def _flag(panel: str, text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401 - typer's own type
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, **more)


def _number(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_NUMBER: dict[str, Any] = {"parser": _number, "metavar": "INTEGER"}
"""Also 4k and 4K."""

_model, _speculation, _gpus, _serving = (
    partial(_flag, panel) for panel in ("Models", "Speculation", "Devices and memory", "Serving")
)

Target = Annotated[
    str | None,
    typer.Argument(help="Target model: a folder in the Hugging Face layout, or an id on the Hugging Face Hub."),
]
Model = Annotated[str | None, _model("Target model, as an option.", "--model")]
Revision = Annotated[str | None, _model("Branch, tag or commit of the target on the Hub. Default main.", "--revision")]
ServedModelNames = Annotated[
    list[str] | None,
    _model(
        "Model names that requests may use; the first is in responses, metrics and traces. Default: the id or the"
        " folder's name.",
        "--served-model-name",
    ),
]
Tokenizer = Annotated[
    str | None, _model("Tokenizer that replaces the target's: a folder or an id on the Hub.", "--tokenizer")
]
TokenizerRevision = Annotated[
    str | None, _model("Branch, tag or commit of the tokenizer on the Hub. Default main.", "--tokenizer-revision")
]
ChatTemplate = Annotated[
    str | None, _model("File with a chat template (Jinja) that replaces the model's.", "--chat-template")
]
LoadFormat = Annotated[
    str | None, _model("safetensors, dummy (random weights) or synthetic (from a recipe).", "--load-format")
]
Dtype = Annotated[str | None, _model("auto, float32, bfloat16 or float16, for both models.", "--dtype")]
DraftDtype = Annotated[str | None, _model("Type of the draft, if different.", "--draft-dtype")]
Quantization = Annotated[
    str | None,
    _model("fp8: weights of 16 bits become FP8 while loading, for both models. Default none.", "--quantization", "-q"),
]
BatchInvariant = Annotated[
    str | None,
    _model(
        "auto, on or off: same bits of the target's logits in any batch. Default auto: on one H100 or H200 in 16 bits.",
        "--batch-invariant",
    ),
]
DraftQuantization = Annotated[str | None, _model("The same of the draft, if different.", "--draft-quantization")]
MaxModelLen = Annotated[
    int | None,
    _model(
        "Maximum length of prompt and output together, in tokens. Default: the model's.", "--max-model-len", **_NUMBER
    ),
]

DraftModel = Annotated[
    str | None,
    _speculation(
        "Draft model: a folder or an id. Without one there is no speculation.", "--draft-model", "--spec-model"
    ),
]
DraftRevision = Annotated[
    str | None, _speculation("Branch, tag or commit of the draft on the Hub. Default main.", "--draft-revision")
]
_METHOD = (
    "How to draft: draft_model, ngram, suffix, none, a head (eagle, eagle3, mtp, dflash, medusa, mlp_speculator) or a"
    " proposer of your own (module:Class)."
)
Method = Annotated[str | None, _speculation(_METHOD, "--method", "--spec-method")]
DraftLength = Annotated[
    int | None,
    _speculation(
        "Maximum number of draft tokens per step. Default 8.", "--num-speculative-tokens", "--spec-tokens", "-k"
    ),
]
Acceptance = Annotated[
    str | None, _speculation("rejection, coupled or typical. Default rejection.", "--acceptance-method")
]
DisableByBatch = Annotated[
    int | None,
    _speculation("Number of running or waiting requests from which speculation is off.", "--disable-by-batch-size"),
]

Device = Annotated[str | None, _gpus("auto, cpu, cuda or cuda:N, for both models. Default auto.", "--device")]
DraftDevice = Annotated[str | None, _gpus("Device of the draft, if different.", "--draft-device")]
TensorParallel = Annotated[
    int | None, _gpus("Number of GPUs of the target. Default 1.", "--tensor-parallel-size", "-tp")
]
DraftTensorParallel = Annotated[
    int | None, _gpus("Number of GPUs of the draft. Default 1.", "--draft-tensor-parallel-size")
]
Optimize = Annotated[
    str | None,
    _gpus(
        "latency or throughput: choose the arrangement of several GPUs for it: apart, the target over all, or"
        " a replica of both models on each. Default: apart.",
        "--optimize",
    ),
]
MemoryShare = Annotated[
    float | None,
    _gpus(
        "Fraction of each GPU's memory to use, in (0, 1]; models on one GPU divide it.",
        "--gpu-memory-utilization",
        "--device-memory-utilization",
    ),
]
KVCacheBytes = Annotated[
    int | None,
    _gpus("Size of the target's KV cache in bytes.", "--kv-cache-bytes", "--kv-cache-memory-bytes", **_NUMBER),
]
PageSize = Annotated[int | None, _gpus("Tokens in a KV page. Default 16.", "--page-size", "--block-size")]
PrefixCaching = Annotated[
    bool | None,
    _gpus(
        "Reuse the KV pages of common prefixes. Default on.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
]
EnforceEager = Annotated[bool, _gpus("Do not use CUDA graphs.", "--enforce-eager")]
NumThreads = Annotated[int | None, _gpus("Number of CPU threads of each model.", "--num-threads")]

Host = Annotated[str | None, _serving("Address to listen on. Default 127.0.0.1.", "--host")]
Port = Annotated[int | None, _serving("Port of the gRPC API. Default 50050.", "--port", "-p")]
MaxRunning = Annotated[
    int | None,
    _serving("Maximum number of running requests. Default 256.", "--max-running-requests", "--max-num-seqs"),
]
NumCoordinators = Annotated[
    int | None,
    _serving("Coordinator processes on one port, at most 64; they share no limits. Default 1.", "--num-coordinators"),
]
MaxBatched = Annotated[
    int | None,
    _serving(
        "Maximum number of tokens in a forward. Default 4096 on a GPU, 1024 on a CPU.",
        "--max-batched-tokens",
        "--max-num-batched-tokens",
        **_NUMBER,
    ),
]
MaxLogprobs = Annotated[int | None, _serving("Maximum number of logprobs per position. Default 20.", "--max-logprobs")]
MetricsPort = Annotated[
    int | None,
    _serving("Port of the coordinator's metrics; the target and the draft use the next two.", "--metrics-port"),
]
Http = Annotated[bool | None, _serving("Serve the OpenAI-compatible HTTP API. Default on.", "--http/--no-http")]
HttpPort = Annotated[int | None, _serving("Port of the HTTP API. Default 8000.", "--http-port")]
ApiTokenFile = Annotated[
    str | None, _serving("File with the API keys, one per line, required for HTTP and gRPC.", "--api-token-file")
]
ApiKey = Annotated[
    list[str] | None,
    _serving("API key, instead of a file; may be repeated. Other users of this host can read it.", "--api-key"),
]
GenerationConfigFlag = Annotated[
    str | None,
    _serving(
        "Sampling defaults: auto (the model's generation_config.json) or none (vLLM: vllm). Default auto.",
        "--generation-config",
    ),
]
LogLevel = Annotated[str | None, _serving("debug, info, warning or error.", "--log-level")]
DisableLogStats = Annotated[bool, _serving("Do not log throughput while requests run.", "--disable-log-stats")]


def serve(
    context: typer.Context,
    target: Target = None,
    *,
    model: Model = None,
    revision: Revision = None,
    served_model_name: ServedModelNames = None,
    tokenizer: Tokenizer = None,
    tokenizer_revision: TokenizerRevision = None,
    chat_template: ChatTemplate = None,
    load_format: LoadFormat = None,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
    quantization: Quantization = None,
    draft_quantization: DraftQuantization = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
    draft_model: DraftModel = None,
    draft_revision: DraftRevision = None,
    method: Method = None,
    num_speculative_tokens: DraftLength = None,
    acceptance_method: Acceptance = None,
    disable_by_batch_size: DisableByBatch = None,
    speculative_config: SpeculativeConfig = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    tensor_parallel_size: TensorParallel = None,
    draft_tensor_parallel_size: DraftTensorParallel = None,
    optimize: Optimize = None,
    gpu_memory_utilization: MemoryShare = None,
    kv_cache_bytes: KVCacheBytes = None,
    page_size: PageSize = None,
    prefix_caching: PrefixCaching = None,
    enforce_eager: EnforceEager = False,
    num_threads: NumThreads = None,
    host: Host = None,
    port: Port = None,
    http: Http = None,
    http_port: HttpPort = None,
    api_token_file: ApiTokenFile = None,
    api_key: ApiKey = None,
    generation_config: GenerationConfigFlag = None,
    max_running_requests: MaxRunning = None,
    num_coordinators: NumCoordinators = None,
    max_batched_tokens: MaxBatched = None,
    max_logprobs: MaxLogprobs = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    disable_log_stats: DisableLogStats = False,
    config: ConfigFile = None,
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Start draft, target, coordinator and HTTP gateway on this host, and print the addresses when all are ready."""
    flags = settings_of(context.params)
    guard_output()
    require_for_file(config)
    given = parse_set(set_options)
    flags["target", "model"] = _target(target, model)
    keys = _held(api_key, api_token_file)
    if keys is not None:
        flags["coordinator", "api_token_file"] = keys.path
    names = flag_names(context.params, typed_flags(context), given)
    effective = _load({**flags, **given}, speculative_config, config, names)
    plan = prepare_stack(
        effective,
        gpu_memory_utilization=_share(gpu_memory_utilization),
        serves_http=True,
        optimize=_chosen(optimize),
    )
    plan = plan if keys is None else inheriting(plan, keys.descriptors)
    on_ready = partial(_print_ready, settings=effective.settings.coordinator)
    asyncio.run(run_until_signal(plan, verbose=verbose, on_ready=on_ready))


def _load(flags: dict[Place, Any], speculative_config: str | None, config: str | None, names: FlagNames) -> Effective:
    try:
        return load_all(flags, speculative_config=speculative_config, config=config, flag_names=names)
    except ConfigError as error:
        if error.field != MODEL or error.problem != UNSET:
            raise
        raise ConfigError("", "a model is needed: outrider serve MODEL (a folder or a Hub id)") from error


def _target(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option not in {None, argument}:
        raise ConfigError("--model", f"is {option}, and the target was named {argument}; one of them should go")
    return argument if option is None else option


def _held(keys: list[str] | None, file: str | None) -> LinkSecret | None:
    """The API keys of the command line, kept in memory."""
    if not keys:
        return None
    if file is not None:
        raise ConfigError("--api-key", "is given together with --api-token-file; one of them should go")
    return hold_tokens([check_token("--api-key", key) for key in keys])


def _chosen(given: str | None) -> Load | None:
    load = next((load for load in LOADS if load == given), None)
    if given is not None and load is None:
        raise ConfigError("--optimize", f"should be {' or '.join(LOADS)}, not {given or 'empty'}")
    return load


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ConfigError("--gpu-memory-utilization", f"should be above 0 and at most 1, not {value:g}")
    return value


def _draft_lengths(settings: CoordinatorSettings) -> str:
    limit = settings.disable_by_batch_size
    return draft_length_text(settings.num_speculative_tokens, settings.draft_length, disable_by_batch_size=limit)


def _print_ready(plan: StackPlan, described: Described, settings: CoordinatorSettings) -> None:
    """Print all lines in one write, so that a reader may close the pipe after the first line."""
    lines = [f"Outrider is ready at {plan.address}"]
    if plan.http_url:
        lines.append(f"  OpenAI's API: {plan.http_url}")
    if len(plan.coordinators) > 1:
        lines.append(f"  {len(plan.coordinators)} coordinators share that port; each has its own limits and queue")
    for role, description in described.items():
        lines.append(f"  {role}: {model_text(description.model_name, ModelPlacement.of(description))}")
    if any(role.startswith("draft") for role in described):
        lines.append(f"  drafts: {_draft_lengths(settings)}")
    output.print("\n".join(lines), markup=False)
