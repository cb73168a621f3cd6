"""``outrider check``: whether a model would load, by its configuration alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli.options import output
from outrider.config import TargetSettings, load
from outrider.errors import ConfigError, install_command
from outrider.process.model_files import is_hub_id, require_weights_on_hub, with_local_model

if TYPE_CHECKING:
    from outrider.model_executor.loader.estimate import ModelEstimate

_MIB, _GIB = 1 << 20, 1 << 30
_READ_RATES = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second of GPU memory, as NVIDIA has them."""


def check(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its id on the Hugging Face Hub.")],
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub. Default main.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str, typer.Option("--quantization", "-q", help="fp8: weights of 16 bits become FP8.")
    ] = "none",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, model or fp8: type of keys and values in the cache.")
    ] = "auto",
    model_impl: Annotated[
        str, typer.Option(help="auto, native or transformers: whose code computes the model.")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="GPUs that share the model.")
    ] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Whole experts on each GPU.")
    ] = False,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence, in tokens.")] = None,
) -> None:
    """Say how a model would load and how much memory it takes, or why it would not.

    Its configuration and tokenizer are read, and of weights in a folder what the headers of their files say. No weights
    are downloaded.
    """
    given = {
        "model": model, "revision": revision, "load-format": "dummy", "dtype": dtype, "quantization": quantization,
        "kv-cache-dtype": kv_cache_dtype, "model-impl": model_impl, "tensor-parallel-size": tensor_parallel_size,
        "max-model-len": max_model_len,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    settings = load(TargetSettings, [*flags, *(["--enable-expert-parallel"] if enable_expert_parallel else [])], {})
    folder = Path(with_local_model(settings).model)
    if is_hub_id(model):
        require_weights_on_hub(model, revision)
    found: ModelEstimate = _engine().estimate_model(
        folder,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        model_impl=settings.model_impl,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=settings.max_model_len,
        enable_expert_parallel=settings.enable_expert_parallel,
        reads_headers=not is_hub_id(model),  # of which some files may be there, and others not yet
    )
    output.print(_table(found, settings.tensor_parallel_size))


def _engine() -> Any:  # noqa: ANN401 - a module
    """The module that estimates; ``ConfigError`` where the engine is not installed."""
    try:
        return importlib.import_module("outrider.model_executor.loader.estimate")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "outrider":
            raise
        raise ConfigError("", f"check needs {missing}: {install_command('engine')}") from error


def _speed(num_bytes: int, each: str) -> str:
    """Bound of plain decoding by what a token reads."""
    bounds = ", ".join(f"{rate / num_bytes:,.0f} on an {gpu}" for gpu, rate in _READ_RATES.items())
    return f"reads {num_bytes / _GIB:.2f} GiB a token{each}: tokens/s of one user without drafts are below {bounds}"


def _kv_cache(found: ModelEstimate) -> str:
    """Memory of keys and values."""
    if found.kv_bytes_per_token is None:
        return "known once the model is loaded: its code needs weights to run"
    kept = "" if found.window is None else f", of which some layers keep {found.window:,} tokens"
    longest = f"{found.longest_bytes / _GIB:.2f} GiB for the longest sequence{kept}"
    return f"{found.kv_bytes_per_token:,} bytes a token, {longest}"


def _table(found: ModelEstimate, num_ranks: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    each = "" if num_ranks == 1 else f" on each of {num_ranks} GPUs"
    for name, value in {
        "loads": "yes",
        "path": found.path,
        **({"served": "text; images and sound are refused"} if found.is_text_part else {}),
        "weights": found.weights,
        "weight memory": f"{found.weight_bytes / _GIB:.2f} GiB{each}",
        **({"speed": _speed(found.decoding_bytes, each)} if found.decoding_bytes else {}),
        "KV cache": _kv_cache(found),
        **({"recurrent layers": f"{found.state_bytes / _MIB:.1f} MiB a sequence"} if found.state_bytes else {}),
        "longest sequence": f"{found.max_model_len:,} tokens",
    }.items():
        table.add_row(name, value)
    return table
