"""Arrangement of the models on several GPUs, for the load that a user names.

Owns the choice between both models on one GPU, target and draft apart, the target over all GPUs with the draft on one
of them, replicas of both on equal parts of the GPUs, and targets that share a draft, by time and by memory, with the
reason in words. Knows the models by their files and `config.json` only (docs/decisions/several-gpus.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from outrider.cli.stack.gpus import Gpus
from outrider.cli.stack.placement import has_cache_size, shares_of_one_gpu
from outrider.cli.stack.preflight import read_config
from outrider.config import DraftSettings, Settings, TargetSettings
from outrider.config.fields import DraftAhead
from outrider.errors import ConfigError, ModelError
from outrider.process.model_files import weight_files

Load: TypeAlias = Literal["latency", "throughput"]
"""Aim of an arrangement: time per token of few users, or tokens per second of many."""
LOADS: tuple[Load, ...] = get_args(Load)

_BYTES_PER_S = 4e12
"""Rate at which a forward of few tokens reads the weights; an H200 has 4.8e12, an H100 3.35e12."""
_ALL_REDUCE_S = 10e-6
"""Time of an all-reduce of a few tokens, fused with the normalisation; two a layer (docs/decisions/several-gpus.md)."""
_MIN_SAVING_RATIO = 2.0
"""Minimum ratio of what a target over several GPUs saves to what its sums cost; below it the draft has its own GPU."""
_MOST_OF_A_GPU = 0.6
"""Share of a GPU's memory for the weights of one replica of both models; the rest is for the KV cache and for graphs.
"""
_BYTES_OF_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST = 1 << 30
"""Bound on any number of a model's shape, so that results fit a float."""

_APART = (DraftAhead.CHAIN, DraftAhead.AUTO)
"""Modes of drafting ahead that need a GPU for each model."""
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
    shares_draft: bool = False
    """The replicas are of the target alone: one draft serves all."""


@dataclass(frozen=True, slots=True)
class Model:
    """Size of a model."""

    num_bytes: float
    """Size of its weights on all GPUs together."""
    num_layers: int
    num_kv_heads: int


def arrange(
    settings: Settings,
    gpus: Gpus,
    load: Load | None,
    explicit: Collection[tuple[str, str]],
    *,
    gpu_memory_utilization: float | None = None,
) -> Arrangement:
    """The arrangement for a load; ``ConfigError`` where the settings place the models already or no arrangement has
    room for the weights, ``ModelError`` for a model folder from which no size can be read.

    Without a load, both models share a GPU if their weights have room, unless the pair is placed, has KV caches of a
    size that was set, or drafts ahead on two GPUs: placement decides then. With fewer than two GPUs there is no choice,
    and the reason says so.
    """
    named = next((place for place in _CHOSEN_HERE if place in explicit), None)
    if load is None:
        is_placed = named is not None or has_cache_size(settings.target) or has_cache_size(settings.draft)
        is_open = not is_placed and settings.coordinator.draft_ahead not in _APART
        return _on_one_gpu(settings, gpus) if is_open and len(gpus) > 1 else Arrangement(settings)
    if named is not None:
        raise ConfigError("--optimize", f"chooses where the models run, and {'.'.join(named)} is set; one should go")
    if len(gpus) < 2:
        return Arrangement(settings, reason=f"--optimize {load} chooses nothing with {_counted(len(gpus))}")
    choice = _choice(settings, gpus, gpu_memory_utilization)
    if load == "throughput" and (size := choice.size_of_replicas()) is not None:
        return choice.replicas(size)
    if load == "throughput" and (size := choice.size_of_targets()) is not None:
        return choice.pool(size)
    found = choice.one_of_each(load)
    is_open = ("coordinator", "draft_ahead") not in explicit
    return _drafting_ahead(found) if is_open and load == "latency" and choice.draft_bytes else found


def _on_one_gpu(settings: Settings, gpus: Gpus) -> Arrangement:
    """Both models on the first GPU if their weights leave room there; else, or without a draft, all is left open."""
    choice = _choice(settings, gpus)
    return choice.shared_gpu() if choice.draft_bytes and choice.has_room_for_replica(1) else Arrangement(settings)


def _choice(settings: Settings, gpus: Gpus, utilization: float | None = None) -> _Choice:
    has_draft = settings.draft.method.has_model and settings.draft.model is not None
    target = _sized(settings.target, settings.target.model)
    draft_bytes = _sized(settings.draft, str(settings.draft.model)).num_bytes if has_draft else 0.0
    return _Choice(settings, gpus, target, draft_bytes, utilization)


def _drafting_ahead(found: Arrangement) -> Arrangement:
    """The arrangement with a draft on a GPU of its own, which pays for few users by drafting ahead (docs/ahead.md)."""
    settings = found.settings
    if settings.draft.device != "auto":  # it shares one
        return found
    coordinator = settings.coordinator.model_copy(update={"draft_ahead": DraftAhead.AUTO})
    return replace(found, settings=replace(settings, coordinator=coordinator))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One target and one draft, placed."""

    settings: Settings
    where: str
    shortage: str = ""
    """Model that lacks room for its weights, with the bytes; empty if both have it."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Arrangements of these models on these GPUs."""

    settings: Settings
    gpus: Gpus
    target: Model
    draft_bytes: float
    utilization: float | None
    """Fraction of each GPU's memory for the models on it; None: as the services choose."""

    def size_of_replicas(self) -> int | None:
        """The smallest number of GPUs on which a replica leaves room for its KV cache, if the GPUs make several."""
        for size in reversed(self._sizes()):
            makes_several = size < len(self.gpus) and len(self.gpus) % size == 0
            if makes_several and self.has_room_for_replica(size):
                return size
        return None

    def has_room_for_replica(self, size: int) -> bool:
        """True if a replica of both models on ``size`` GPUs leaves room for its KV cache."""
        return self._replica_bytes(size) <= _MOST_OF_A_GPU * self._memory

    def shared_gpu(self) -> Arrangement:
        """Both models on the first GPU."""
        room = f"{_gigabytes(self._replica_bytes(1))} of weights leave room for their KV caches"
        more = "--optimize latency or throughput uses the other GPUs too"
        return Arrangement(self._placed(1), reason=f"target and draft share the first GPU: {room}; {more}")

    def replicas(self, size: int) -> Arrangement:
        """Replicas on ``size`` GPUs each."""
        if size == 1:
            where, sums = f"each of the {len(self.gpus)} GPUs has a replica of its own", ", and no sums cross GPUs"
        else:
            where, sums = f"each {size} of the {len(self.gpus)} GPUs have a replica of their own", ""
        room = f"{_gigabytes(self._replica_bytes(size))} of weights leave room for its KV cache"
        further = tuple(f"cuda:{first}" for first in range(size, len(self.gpus), size))
        return Arrangement(self._placed(size), further, f"for throughput {where}: on a GPU {room}{sums}")

    def size_of_targets(self) -> int | None:
        """The smallest number of GPUs on which a target leaves room for its KV cache, if several targets leave one GPU
        for a draft.
        """
        room, others = _MOST_OF_A_GPU * self._memory, len(self.gpus) - 1
        if not self.draft_bytes or self.draft_bytes > room:
            return None
        fitting = (size for size in reversed(self._sizes()) if self.target.num_bytes / size <= room)
        return next((size for size in fitting if others > size and others % size == 0), None)

    def pool(self, size: int) -> Arrangement:
        """Targets on ``size`` GPUs each, and a draft for all of them on the last GPU."""
        last = len(self.gpus) - 1
        targets = self.settings.target.model_copy(update={"device": "cuda:0", "tensor_parallel_size": size})
        draft = self.settings.draft.model_copy(update={"device": f"cuda:{last}"})
        further = tuple(f"cuda:{first}" for first in range(size, last, size))
        where = f"{last // size} targets, on {_counted(size)} each, share a draft on the last GPU"
        room = f"{_gigabytes(self.target.num_bytes / size)} of weights leave room for a KV cache"
        reason = f"for throughput {where}: {room}, and {_counted(last + 1)} make no equal parts for replicas of both"
        return Arrangement(replace(self.settings, target=targets, draft=draft), further, reason, shares_draft=True)

    def one_of_each(self, load: Load) -> Arrangement:
        """The target over as many GPUs as its heads allow, unless the sums between them cost more than they save;
        another arrangement where the weights have no room.
        """
        sizes = self._sizes()
        saved_ms = 1e3 * self.target.num_bytes / _BYTES_PER_S * (1 - 1 / sizes[0])
        sums_ms = 1e3 * 2 * self.target.num_layers * _ALL_REDUCE_S
        apart = [self._apart(size) for size in sizes if size == 1 or (self._has_draft and size < len(self.gpus))]
        shared = [self._shared(sizes[0])] if sizes[0] > 1 else []
        pays = load == "throughput" or saved_ms > _MIN_SAVING_RATIO * sums_ms
        candidates = [*shared, *apart] if pays else [apart[-1], *shared, *apart[:-1]]
        if pays and shared and self._has_draft and sizes[0] < len(self.gpus):  # one is left over for the draft
            candidates = [apart[0], *shared, *apart[1:]]
        found = next((each for each in candidates if not each.shortage), None)
        if found is None:
            lacks = "; ".join(each.shortage for each in candidates)
            raise ConfigError("--optimize", f"finds no room for the weights: {lacks}")
        reasons = [f"the target reads {_gigabytes(self.target.num_bytes)} a step"]
        if shared:
            reasons[0] += f", of which {_counted(sizes[0])} save {saved_ms:.2g} ms"
        if found is not candidates[0]:
            reasons = [candidates[0].shortage]
        elif load == "throughput":
            reasons.append(self._why_no_replicas())
        elif shared:
            reasons.append(f"sums between them cost {sums_ms:.2g} ms")
        if sizes[0] < len(self.gpus):
            reasons.append(f"its {self.target.num_kv_heads} KV heads do not divide over {_counted(len(self.gpus))}")
        return Arrangement(found.settings, reason=f"for {load} {found.where}: {', and '.join(reasons)}")

    @property
    def _has_draft(self) -> bool:
        return self.settings.draft.method.has_model

    @property
    def _memory(self) -> int:
        return min(self.gpus.memory_bytes)

    def _sizes(self) -> list[int]:
        """Numbers of GPUs over which the target's KV heads divide, the largest first."""
        return [size for size in range(len(self.gpus), 0, -1) if self.target.num_kv_heads % size == 0]

    def _replica_bytes(self, size: int) -> float:
        """Bytes of weights on the GPU that the draft shares with a target over ``size`` GPUs."""
        return self.target.num_bytes / size + self.draft_bytes

    def _why_no_replicas(self) -> str:
        needed, there = _gigabytes(self._replica_bytes(1)), _gigabytes(self._memory)
        return f"a replica's {needed} of weights are more than {_MOST_OF_A_GPU:g} of a GPU's {there}"

    def _placed(self, size: int) -> Settings:
        """The target from the first GPU on, and the draft on that one."""
        first = {"device": "cuda:0"}
        draft = self.settings.draft.model_copy(update=first) if self._has_draft else self.settings.draft
        target = self.settings.target.model_copy(update={**first, "tensor_parallel_size": size})
        return replace(self.settings, target=target, draft=draft)

    def _shared(self, size: int) -> _Candidate:
        """The target over ``size`` GPUs, the draft on the first of them."""
        where = (
            f"the target is on {f'all {size}' if size == len(self.gpus) else f'{size} of the {len(self.gpus)}'} GPUs"
        )
        if not self._has_draft:
            return self._candidate(self._placed(size), where, size, (self.utilization or 1.0, 1.0))
        where += " and the draft on one of them"
        return self._candidate(self._placed(size), where, size, shares_of_one_gpu(self.utilization))

    def _apart(self, size: int) -> _Candidate:
        """The target over ``size`` GPUs, the draft on the next one; placement chooses the devices."""
        where = f"the target is on {size} of the {len(self.gpus)} GPUs and the draft on another one"
        if size == 1:
            where = "the models are apart" if self._has_draft else "the target is on one GPU"
        target = self.settings.target.model_copy(update={"tensor_parallel_size": size})
        share = self.utilization or 1.0
        return self._candidate(replace(self.settings, target=target), where, size, (share, share))

    def _candidate(self, placed: Settings, where: str, size: int, shares: tuple[float, float]) -> _Candidate:
        each = " on each of them" if size > 1 else ""
        needs = (
            (placed.target, self.target.num_bytes / size, shares[0], each),
            (placed.draft, self.draft_bytes, shares[1], ""),
        )
        lacks = []
        for section, needed, share, on in needs:
            there = self._memory * (1.0 if has_cache_size(section) else share)
            if needed > there:
                lacks.append(f"the {section.name} needs {_gigabytes(needed)}{on} and has {_gigabytes(there)}")
        return _Candidate(placed, where, f"where {where}, {' and '.join(lacks)}" if lacks else "")


def _sized(section: TargetSettings | DraftSettings, folder: str) -> Model:
    return model_of(Path(folder), section.name, dtype=section.dtype, has_weights=section.load_format == "safetensors")


def model_of(folder: Path, role: str, *, dtype: str = "auto", has_weights: bool = True) -> Model:
    """Size of the model in a folder as it is loaded: of the files that the loader reads, otherwise, or where they are
    not read, estimated from the shapes.

    ``ModelError``, which names the model by its ``role``, for a shape that is none or a file that cannot be read.
    """
    config = _Shape(folder, role)
    layers, heads = config.number("num_hidden_layers"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    try:
        on_disk = sum(path.stat().st_size for path in weight_files(folder)) if has_weights else 0
    except OSError as error:
        raise ModelError(f"{role} model: {error.filename} cannot be read: {error.strerror}") from error
    stored = config.bytes_per_parameter()
    loaded = _BYTES_OF_DTYPES.get(dtype, stored)
    num_bytes = on_disk * loaded / stored if on_disk else loaded * config.num_parameters(layers, heads, kv_heads)
    return Model(num_bytes, layers, kv_heads)


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

    def bytes_per_parameter(self) -> int:
        """Bytes by the type that the file names; 2 without a known one."""
        dtype = self._config.get("dtype") or self._config.get("torch_dtype")
        return _BYTES_OF_DTYPES.get(dtype, 2) if isinstance(dtype, str) else 2

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
