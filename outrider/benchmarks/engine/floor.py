"""The least time a forward can take: bytes that must move and operations that must be done, over what the device can.

Owns the counting (from a model's configuration alone) and the measuring of the device (copying, multiplying). Counted
are matrices, the rows of the embedding that are looked up, and keys, values and states read and written; activations
are not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.benchmarks.samples import statistics_of
from outrider.model_executor.models import Decoder, ModelConfig
from outrider.model_executor.models.weights import weight_targets

_COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 9
"""Samples of a copy or product, of which the shortest counts."""
_KINDS = {"weight": 1, "blocks": 2, "scales": 0}
"""Numbers in a value of a matrix's tensor, by the end of its name: two of MXFP4 share a byte."""
_STATE_ITEM = 4
"""Bytes of a number of a recurrent state, which is float32."""


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """Work of one forward: bytes and operations."""

    num_bytes: int
    num_operations: int


@dataclass(frozen=True, slots=True)
class Device:
    """Measured speed of the device."""

    bytes_per_second: float
    """Copying: bytes read and written together."""
    operations_per_second: float
    """Multiplying square matrices; a multiplication and an addition are two."""

    def floor_seconds(self, work: ForwardWork) -> float:
        """The larger of the two times."""
        return max(work.num_bytes / self.bytes_per_second, work.num_operations / self.operations_per_second)


def forward_work(
    config: ModelConfig, dtype: torch.dtype, *, batch_size: int, num_tokens: int, context: int, num_logits: int
) -> ForwardWork:
    """Work of a forward of `num_tokens` a row that bring each row's sequence to `context` tokens.

    `num_logits` rows go through the head for each sequence. Sliding windows shorten what is read; recurrent layers read
    and write a state instead.
    """
    multiplied = matrix_parameters(config, dtype, num_tokens=1)
    head = config.vocab_size * config.hidden_size
    windows = [window for layer, window in enumerate(config.sliding_windows) if not config.is_recurrent(layer)]
    seen = sum(min(context, window or context) for window in windows)
    kv_per_token = 2 * config.num_kv_heads * config.head_dim
    embedding = batch_size * num_tokens * config.hidden_size
    written = batch_size * num_tokens * kv_per_token * len(windows)
    weights = matrix_bytes(config, dtype, num_tokens=batch_size * num_tokens)
    values = head * (num_logits > 0) + embedding + written + batch_size * seen * kv_per_token
    products = batch_size * (num_tokens * multiplied + num_logits * head)
    attention = 2 * batch_size * num_tokens * seen * config.num_heads * config.head_dim
    num_bytes = weights + values * dtype.itemsize + 2 * batch_size * _state_bytes(config)
    return ForwardWork(num_bytes, num_operations=2 * (products + attention))


def matrix_parameters(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int = 1) -> int:
    """Weights of all layers' matrices that tokens meet; embedding and head left out. Of experts, as many as independent
    choices of that many tokens meet on average.
    """
    dense, of_experts = _matrices(config, dtype)
    return dense.values + round(_share_met(config, num_tokens) * of_experts.values)


def matrix_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int = 1) -> int:
    """Bytes of ``matrix_parameters``, without scales of FP8."""
    dense, of_experts = _matrices(config, dtype)
    return dense.num_bytes + round(_share_met(config, num_tokens) * of_experts.num_bytes)


@dataclass(slots=True)
class _Matrices:
    values: int = 0
    num_bytes: int = 0


@functools.lru_cache(maxsize=4)
def _matrices(config: ModelConfig, dtype: torch.dtype) -> tuple[_Matrices, _Matrices]:
    """Matrices that every token meets, and those of experts."""
    dense, of_experts = _Matrices(), _Matrices()
    for name, target in weight_targets(Decoder(config, dtype=dtype, device=torch.device("meta"))).items():
        tensor, kind = target.destination, name.rpartition(".")[2]
        if tensor is None or len(target.shape) == 1 or ".layers." not in name or kind not in _KINDS:
            continue
        found = of_experts if ".experts." in name else dense
        found.values += _KINDS[kind] * tensor.numel()
        found.num_bytes += tensor.nbytes
    return dense, of_experts


def _share_met(config: ModelConfig, num_tokens: int) -> float:
    if (experts := config.experts) is None:
        return 1.0
    return 1 - (1 - experts.num_chosen / experts.count) ** num_tokens


def _state_bytes(config: ModelConfig) -> int:
    """Bytes of a sequence's states in recurrent layers."""
    if (recurrent := config.recurrent) is None:
        return 0
    return sum(recurrent.layers) * recurrent.num_heads * recurrent.key_dim * recurrent.value_dim * _STATE_ITEM


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Copy and multiply for a moment; the best of several goes, since a floor is what can be done."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copying = _best_seconds(lambda: destination.copy_(source), device)
    size = _MATRIX_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    multiplying = _best_seconds(lambda: torch.mm(left, right, out=product), device)
    return Device(2 * source.nbytes / copying, 2 * size**3 / multiplying)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    found = statistics_of(timed_samples(work, device, num_samples=_REPEATS, num_warmups=2))
    return 0.0 if found is None else found.minimum


def timed_samples(
    work: Callable[[], object],
    device: torch.device,
    *,
    num_samples: int,
    num_warmups: int,
    undo: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of each go, to the end of what it started on the device; `undo` runs after each and is not timed."""
    samples = []
    for _ in range(num_warmups + num_samples):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        samples.append(time.perf_counter() - began)
        undo()
    return samples[num_warmups:]


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
