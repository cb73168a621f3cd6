"""Description of a service with a model, as ``describe()`` returns it.

Owns the making of a ``ModelDescription`` from a folder and a runner.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider import __version__
from outrider.kernels.fp8_linear import FP8
from outrider.model_executor.device_setup import device_facts
from outrider.model_executor.loader.tokenizer_files import check_tokenizer, read_tokenizer
from outrider.model_executor.synthetic.recipe import FILE
from outrider.types import NOISE_MARK, SYNTHETIC_MARK, ModelDescription

if TYPE_CHECKING:
    from outrider.model_executor.loader.model import LoadFormat
    from outrider.model_executor.model_runner import ModelRunner


def describe_model(
    role: str,
    folder: Path | str,
    runner: ModelRunner,
    *,
    load_format: LoadFormat = "safetensors",
    name: str | None = None,
) -> ModelDescription:
    """Facts of a loaded model and of the tokenizer in its folder; ``ModelError`` when the two do not fit.

    ``name`` is what the model is served as; None is the folder's name.
    """
    config = runner.config
    tokenizer = read_tokenizer(Path(folder), vocab_size=config.vocab_size)
    check_tokenizer(Path(folder), tokenizer)
    return ModelDescription(
        role=role,
        model_name=(name or Path(folder).resolve().name) + mark_of(Path(folder), load_format),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        num_token_ids=tokenizer.num_token_ids or config.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
        dtype=str(runner.dtype).removeprefix("torch."),
        quantization="; ".join(filter(None, (str(config.quantization or ""), _kv_cache_text(runner)))),
        batch_invariant=runner.batch_invariant,
        **device_facts(runner.device),
        page_size=runner.page_size,
        num_pages=runner.sequences.pool.num_pages,
        tokenizer_files=tokenizer.files,
        tokenizer_hash=tokenizer.sha256,
        version=__version__,
        tensor_parallel_size=runner.tensor_parallel_size,
        hidden_size=config.hidden_size if role == "target" else 0,
        num_layers=config.num_layers if role == "target" else 0,
    )


def _kv_cache_text(runner: ModelRunner) -> str:
    """An FP8 cache and its scales; empty for others."""
    if runner.kv_cache.dtype != FP8:
        return ""
    scales = [scale for layer in runner.worker.model.scaled_layers.values() for scale in layer.kv_scales]
    least, most = (f"{scale:.3g}" for scale in (min(scales), max(scales)))
    return f"fp8 KV cache, scales {least}" + ("" if least == most else f" to {most}")


def mark_of(folder: Path, load_format: LoadFormat = "safetensors") -> str:
    """Suffix of the name of an untrained model, by its folder; empty for any other."""
    if load_format == "dummy":
        return NOISE_MARK
    return SYNTHETIC_MARK if (folder / FILE).is_file() else ""
