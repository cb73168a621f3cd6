"""``outrider serve``: the three services on this host, as one command."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import typer

from outrider.cli.facts import draft_length_text, model_text
from outrider.cli.options import Verbose, errors_as_lines, output
from outrider.cli.settings_flags import ConfigFile, SetOptions, SpeculativeConfig, parse_set
from outrider.cli.stack.plan import Place, StackPlan
from outrider.cli.stack.preparation import prepare_stack
from outrider.cli.stack.running import Described, run_until_signal
from outrider.config import CoordinatorSettings, load_all
from outrider.generation import ModelPlacement
from outrider.telemetry import guard_output

Target = Annotated[str | None, typer.Argument(help="Folder of the target model in the Hugging Face layout.")]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", help="Folder of the draft model; none: no speculation.")
]
Method = Annotated[str | None, typer.Option("--method", help="draft_model, ngram or none.")]
DraftLength = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-k", help="Most draft tokens a step. Default 8.")
]
Acceptance = Annotated[
    str | None, typer.Option("--acceptance-method", help="rejection, coupled or typical. Default rejection.")
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. Default 127.0.0.1.")]
Port = Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on. Default 50050.")]
Device = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N, for both models. Default auto.")
]
DraftDevice = Annotated[str | None, typer.Option("--draft-device", help="Another device for the draft.")]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tensor-parallel-size", "-tp", help="Processes that share the target, each with a GPU. Default 1."),
]
DraftTensorParallel = Annotated[
    int | None, typer.Option("--draft-tensor-parallel-size", help="The same for the draft. Default 1.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16, for both models.")]
DraftDtype = Annotated[str | None, typer.Option("--draft-dtype", help="Another type for the draft.")]
LoadFormat = Annotated[
    str | None, typer.Option("--load-format", help="safetensors, dummy (noise) or synthetic (by recipe).")
]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt and output, in tokens.")]
PageSize = Annotated[int | None, typer.Option("--page-size", help="Tokens in a KV page. Default 16.")]
MaxBatched = Annotated[int | None, typer.Option("--max-batched-tokens", help="Most tokens in a forward. Default 1024.")]
NumThreads = Annotated[int | None, typer.Option("--num-threads", help="CPU threads of each model.")]
DisableByBatch = Annotated[
    int | None, typer.Option("--disable-by-batch-size", help="No speculation while so many requests run or wait.")
]
Tokenizer = Annotated[str | None, typer.Option("--tokenizer", help="Folder of a tokenizer in place of the target's.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", help="Port of the coordinator's metrics; the target's and draft's are the next two."
    ),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]

_METRICS_ORDER = ("coordinator", "target", "draft")


def serve(
    target: Target = None,
    *,
    draft_model: DraftModel = None,
    method: Method = None,
    num_speculative_tokens: DraftLength = None,
    acceptance_method: Acceptance = None,
    host: Host = None,
    port: Port = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    tensor_parallel_size: TensorParallel = None,
    draft_tensor_parallel_size: DraftTensorParallel = None,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
    load_format: LoadFormat = None,
    max_model_len: MaxModelLen = None,
    page_size: PageSize = None,
    max_batched_tokens: MaxBatched = None,
    num_threads: NumThreads = None,
    disable_by_batch_size: DisableByBatch = None,
    tokenizer: Tokenizer = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    speculative_config: SpeculativeConfig = None,
    config: ConfigFile = None,
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Start draft, target and coordinator on this host; print the address when everything is ready."""
    flags: dict[Place, Any] = {
        ("target", "model"): target,
        ("draft", "model"): draft_model,
        ("draft", "method"): method,
        ("coordinator", "num_speculative_tokens"): num_speculative_tokens,
        ("coordinator", "acceptance_method"): acceptance_method,
        ("coordinator", "host"): host,
        ("coordinator", "port"): port,
        ("target", "max_model_len"): max_model_len,
        ("coordinator", "disable_by_batch_size"): disable_by_batch_size,
        ("coordinator", "tokenizer"): tokenizer,
        ("target", "tensor_parallel_size"): tensor_parallel_size,
        ("draft", "tensor_parallel_size"): draft_tensor_parallel_size,
        **_both("device", device, draft_device),
        **_both("dtype", dtype, draft_dtype),
        **_both("load_format", load_format),
        **_both("page_size", page_size),
        **_both("max_batched_tokens", max_batched_tokens),
        **_both("num_threads", num_threads),
        **_both("log_level", log_level),
        ("coordinator", "log_level"): log_level,
        **_metrics_ports(metrics_port),
    }
    guard_output()
    with errors_as_lines():
        flags.update(parse_set(set_options))
        effective = load_all(flags, speculative_config=speculative_config, config=config)
        plan = prepare_stack(effective)
        on_ready = partial(_print_ready, settings=effective.settings.coordinator)
        asyncio.run(run_until_signal(plan, verbose=verbose, on_ready=on_ready))


def _both(key: str, value: object, draft_value: object = None) -> dict[Place, Any]:
    return {("target", key): value, ("draft", key): value if draft_value is None else draft_value}


def _metrics_ports(first: int | None) -> dict[Place, Any]:
    """One after the other, so that the three do not collide."""
    return {} if first is None else {(name, "metrics_port"): first + i for i, name in enumerate(_METRICS_ORDER)}


def _print_ready(plan: StackPlan, described: Described, settings: CoordinatorSettings) -> None:
    """In one write, so that a reader who leaves after the first line breaks nothing."""
    lines = [f"Outrider is ready at {plan.address}"]
    for role, description in described.items():
        lines.append(f"  {role}: {model_text(description.model_name, ModelPlacement.of(description))}")
    if "draft" in described:
        lines.append(f"  drafts: {draft_length_text(settings.num_speculative_tokens, settings.draft_length)}")
    output.print("\n".join(lines), markup=False)
