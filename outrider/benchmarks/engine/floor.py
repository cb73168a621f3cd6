"""The least time a forward can take: bytes that must move and operations that must be done, over what the device can.

Owns the counting (from a model's configuration alone) and the measuring of the device (copying, multiplying). Counted
are matrices, the rows of the embedding that are looked up, and keys and values read and written; activations are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.benchmarks.samples import statistics_of
from outrider.model_executor.layers.quantization import Numbers
from outrider.model_executor.models import ModelConfig

_COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class Work:
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

    def floor_seconds(self, work: Work) -> float:
        """The larger of the two times."""
        return max(work.num_bytes / self.bytes_per_second, work.num_operations / self.operations_per_second)


def forward_work(
    config: ModelConfig, dtype: torch.dtype, *, batch_size: int, num_tokens: int, context: int, num_logits: int
) -> Work:
    """Work of a forward of `num_tokens` a row that bring each row's sequence to `context` tokens.

    `num_logits` rows go through the head for each sequence. Sliding windows shorten what is read.
    """
    multiplied = matrix_parameters(config, num_tokens=1)
    head = config.vocab_size * config.hidden_size
    seen = sum(min(context, window or context) for window in config.sliding_windows)
    kv_per_token = 2 * config.num_kv_heads * config.head_dim
    embedding = batch_size * num_tokens * config.hidden_size
    written = batch_size * num_tokens * kv_per_token * config.num_layers
    weights = matrix_bytes(config, dtype, num_tokens=batch_size * num_tokens)
    values = head * (num_logits > 0) + embedding + written + batch_size * seen * kv_per_token
    products = batch_size * (num_tokens * multiplied + num_logits * head)
    attention = 2 * batch_size * num_tokens * seen * config.num_heads * config.head_dim
    return Work(num_bytes=weights + values * dtype.itemsize, num_operations=2 * (products + attention))


def matrix_parameters(config: ModelConfig, *, num_tokens: int = 1) -> int:
    """Weights of all layers' matrices that tokens meet; embedding and head left out. Of experts, as many as independent
    choices of that many tokens meet on average.
    """
    return sum(_parameters(config, num_tokens))


def matrix_bytes(config: ModelConfig, dtype: torch.dtype, *, num_tokens: int = 1) -> int:
    """Bytes of ``matrix_parameters``, without scales of FP8; layers that a format leaves out count as quantized."""
    dense, of_experts = _parameters(config, num_tokens)
    if config.quantization is None:
        return (dense + of_experts) * dtype.itemsize
    if config.quantization.numbers is Numbers.MXFP4:
        return dense * dtype.itemsize + of_experts * 17 // 32  # 4 bits, and 8 for each 32 numbers
    return dense + of_experts


def _parameters(config: ModelConfig, num_tokens: int) -> tuple[int, int]:
    """Weights of attention, MLPs and routers, and those of experts."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp, experts = 3 * config.hidden_size * config.intermediate_size, config.experts
    if experts is None:
        return config.num_layers * (attention + mlp), 0
    met = experts.count * (1 - (1 - experts.num_chosen / experts.count) ** num_tokens)
    num_sparse, router = sum(experts.layers), config.hidden_size * experts.count
    dense = config.num_layers * attention + num_sparse * router + (config.num_layers - num_sparse) * mlp
    return dense, num_sparse * config.hidden_size * round(3 * met * experts.intermediate_size)


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
