"""Arrangement of the models on several GPUs for the load that a user names.

Owns the choice between target and draft apart, the target over all GPUs with the draft on one of them, and one replica
of both per GPU, with the reason in words. Knows the models by their files and `config.json` only (decision 0040).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from outrider.cli.stack.gpus import Gpus
from outrider.cli.stack.preflight import read_config
from outrider.config import Settings
from outrider.errors import ConfigError, ModelError

Load: TypeAlias = Literal["latency", "throughput"]
"""What to optimise: the time a token of few users, or the tokens a second of many."""
LOADS: tuple[Load, ...] = get_args(Load)

_BYTES_PER_S = 4e12
"""Rate at which a forward of few tokens reads the weights; an H200 has 4.8e12, an H100 3.35e12."""
_ALL_REDUCE_S = 10e-6
"""Of a few tokens, fused with the normalisation; two a layer (decision 0007)."""
_WORTH = 2.0
"""A target over several GPUs saves at least so many times what its sums cost, else the draft has its own GPU."""
_MOST_OF_A_GPU = 0.6
"""Of its memory for the weights of one replica of both models; the rest is for the KV cache and for graphs."""
_BYTES_PER_PARAMETER = 2
_MOST = 1 << 30
"""Of any number of a model's shape; what comes of them fits a float."""

_CHOSEN_HERE = (
    ("target", "device"),
    ("target", "tensor_parallel_size"),
    ("draft", "device"),
    ("draft", "tensor_parallel_size"),
)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Settings in which devices may still be open, further replicas, and the reason."""

    settings: Settings
    replica_devices: tuple[str, ...] = ()
    """One for each further replica of target and draft, which share it."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """Size of a model."""

    num_bytes: float
    """Of its weights, all files together."""
    num_layers: int
    num_kv_heads: int


def arrange(settings: Settings, gpus: Gpus, load: Load, explicit: Collection[tuple[str, str]]) -> Arrangement:
    """The arrangement for a load; ``ConfigError`` where the settings place the models already, ``ModelError`` for a
    model folder from which no size can be read.

    With fewer than two GPUs there is no choice, and the reason says so.
    """
    named = next((place for place in _CHOSEN_HERE if place in explicit), None)
    if named is not None:
        raise ConfigError("--optimize", f"chooses where the models run, and {'.'.join(named)} is set; one should go")
    if len(gpus) < 2:
        return Arrangement(settings, reason=f"--optimize {load} chooses nothing with {_counted(len(gpus))}")
    has_draft = settings.draft.method.has_model and settings.draft.model is not None
    target = model_of(Path(settings.target.model), "target")
    draft_bytes = model_of(Path(str(settings.draft.model)), "draft").num_bytes if has_draft else 0.0
    if load == "throughput" and _fits(target.num_bytes + draft_bytes, gpus):
        return _replicas(settings, gpus, target.num_bytes + draft_bytes)
    return _over_all(settings, gpus, load, target)


def _fits(num_bytes: float, gpus: Gpus) -> bool:
    return all(num_bytes <= _MOST_OF_A_GPU * memory for memory in gpus.memory_bytes)


def _replicas(settings: Settings, gpus: Gpus, num_bytes: float) -> Arrangement:
    reason = (
        f"for throughput each of the {len(gpus)} GPUs has a replica of its own: "
        f"{_gigabytes(num_bytes)} of weights leave room for its KV cache, and no sums cross GPUs"
    )
    further = tuple(f"cuda:{index}" for index in range(1, len(gpus)))
    return Arrangement(_on_first(settings), further, reason)


def _over_all(settings: Settings, gpus: Gpus, load: Load, target: Model) -> Arrangement:
    """The target over as many GPUs as its heads allow, unless the sums between them cost more than they save."""
    size = max(size for size in range(1, len(gpus) + 1) if target.num_kv_heads % size == 0)
    saved_ms = 1e3 * target.num_bytes / _BYTES_PER_S * (1 - 1 / size)
    sums_ms = 1e3 * 2 * target.num_layers * _ALL_REDUCE_S
    counted = f"reads {_gigabytes(target.num_bytes)} a step, of which {_counted(size)} save {saved_ms:.2g} ms"
    if size == 1 or (load == "latency" and saved_ms <= _WORTH * sums_ms):
        reason = f"for {load} the models are apart: the target {counted}, and sums between them cost {sums_ms:.2g} ms"
        return Arrangement(settings, reason=reason)
    why = f"and sums between them cost {sums_ms:.2g} ms" if load == "latency" else "and no GPU has room for a replica"
    placed = _on_first(settings)
    placed = replace(placed, target=placed.target.model_copy(update={"tensor_parallel_size": size}))
    where = f"all {size}" if size == len(gpus) else f"{size} of the {len(gpus)}"
    reason = f"for {load} the target is on {where} GPUs and the draft on one of them: the target {counted}, {why}"
    return Arrangement(placed, reason=reason)


def _on_first(settings: Settings) -> Settings:
    first = {"device": "cuda:0"}
    draft = settings.draft.model_copy(update=first) if settings.draft.method.has_model else settings.draft
    return replace(settings, target=settings.target.model_copy(update=first), draft=draft)


def model_of(folder: Path, role: str) -> Model:
    """Size of the model in a folder; without weight files their bytes are estimated from the shapes, at 16 bits.

    ``ModelError``, which names the model by its ``role``, for a shape that is none or a file that cannot be read.
    """
    config = _Shape(folder, role)
    layers, heads = config.number("num_hidden_layers"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    try:
        on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError as error:
        raise ModelError(f"{role} model: {error.filename} cannot be read: {error.strerror}") from error
    return Model(
        float(on_disk) or _BYTES_PER_PARAMETER * config.num_parameters(layers, heads, kv_heads), layers, kv_heads
    )


class _Shape:
    """The numbers of a config.json."""

    def __init__(self, folder: Path, role: str) -> None:
        self._config, self._where = read_config(folder, role), f"{role} model: {folder / 'config.json'}"

    def number(self, key: str, default: int = 1) -> int:
        """A number from 1 on; the default for one that is not given."""
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or not 1 <= value <= _MOST:
            found = repr(value)[:60] if isinstance(value, str | float | int) else f"a {type(value).__name__}"
            raise ModelError(f"{self._where}: {key} should be a whole number from 1 to {_MOST}, not {found}")
        return value

    def num_parameters(self, layers: int, heads: int, kv_heads: int) -> float:
        """Parameters of a dense Llama-like decoder."""
        hidden, intermediate, vocab = map(self.number, ("hidden_size", "intermediate_size", "vocab_size"))
        head_size = self.number("head_dim", default=max(1, hidden // heads))
        attention = 2.0 * hidden * head_size * (heads + kv_heads)
        embeddings = vocab * hidden * (1 if self._config.get("tie_word_embeddings") else 2)
        return layers * (attention + 3 * hidden * intermediate) + embeddings


def _counted(num_gpus: int) -> str:
    return f"{num_gpus} GPU" + "s" * (num_gpus != 1)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
