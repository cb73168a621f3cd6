"""Run by both ranks of a test, as ``python -m tests.model_executor.distributed.two_ranks STORE RANK SYNTHETIC``: every
architecture, and the synthetic model of a folder, shared, beside the same model alone. A rank that finds a difference
ends with an error.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outrider.kernels.fp8_linear import FP8
from outrider.model_executor.distributed import device_communicators
from outrider.model_executor.distributed.communicator import (
    SINGLE_RANK,
    Communicator,
    broadcast_token_ids,
    gather_by_sum,
)
from outrider.model_executor.distributed.device_communicators import CpuCommunicator
from outrider.model_executor.distributed.process_group import Member
from outrider.model_executor.distributed.rank_info import RankInfo
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.graph_capture import CaptureBound, CaptureLimits, NoGraphs
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.kv_calibration import measure_kv_scales
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.experts import SparseMlp
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.layers.gated_delta_net import GatedDeltaNet
from outrider.model_executor.layers.mlp_with_experts import MlpWithExperts
from outrider.model_executor.loader.model import LoadFormat
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.row_batch import RowBatch
from outrider.types import LAST_HIDDEN_STATE
from tests.model_executor.parity import build, random_ids
from tests.model_executor.test_parity import MODELS, SCALED_ROPES
from tests.support import mxfp4_models
from tests.support.fallback_models import GEMMA4_EXPERTS, build_fallback
from tests.support.fp8_models import FORMATS, quantize_folder

TOLERANCE = 2e-5
SIZE = 2
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd-vocabulary": ("llama", {"vocab_size": 271}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
}
FP8_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"intermediate_size": 64}),
    "qwen3-moe": ("qwen3_moe", {"moe_intermediate_size": 64, "num_experts": 3, "num_experts_per_tok": 2}),
    "through transformers": ("smollm3", {"intermediate_size": 64}),
}
THROUGH_TRANSFORMERS = ("smollm3", "starcoder2", "cohere-norms", "cohere2", "gpt_neox", "phi")
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"vocab_size": 271}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
}
MXFP4_MODEL: tuple[str, dict[str, Any]] = ("gpt_oss", {"intermediate_size": 96})
"""Model whose experts' features are shared in halves of 32 and 64."""


EXPERT_PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    "shared expert": ("qwen3_5_moe_text", {}),
    "odd number": ("mixtral", {"num_local_experts": 5, "intermediate_size": 47}),
    "biases": ("gpt_oss", {}),
    "beside an MLP": ("gemma4_text", GEMMA4_EXPERTS),
    "one a token": ("qwen3_moe", {"num_experts_per_tok": 1}),
}
"""Families whose ranks hold whole experts; of an odd number one holds more."""


class BothRun(Member):
    """Ranks that run the same steps without being told, since the test makes them on both."""

    publish = None

    def __init__(self, rank: int) -> None:
        super().__init__(RankInfo(rank, SIZE), one_shot=False)
        self.shard = Shard(rank, SIZE)

    def open_communicator(self, device: torch.device, dtype: torch.dtype) -> Communicator:
        return CpuCommunicator(self.shard, lambda error: None)

    def wait_for_loss(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Prefill, scoring beside a chunk, rollback, and a fork whose page is copied."""
    vocab = runner.config.vocab_size
    text, other = random_ids(40, seed=1, vocab_size=vocab), random_ids(40, seed=2, vocab_size=vocab)
    first, second = runner.sequences.open(60), runner.sequences.open(60)
    found = [runner.forward([ForwardRow(first, text[:20], 20)])]
    found.append(runner.forward([ForwardRow(first, text[20:25], 5), ForwardRow(second, other[:11], 1)]))
    runner.sequences.truncate(first, 18)
    forked = runner.sequences.fork(second, 30)  # both write into its last page
    rows = [ForwardRow(first, other[11:14], 3), ForwardRow(second, text[:2], 2), ForwardRow(forked, text[5:6], 1)]
    found.append(runner.forward(rows))
    assert forked.page_table[-1] != second.page_table[-1]
    runner.forward([ForwardRow(second, [1], 0)])
    return torch.cat(found)


def states_of(runner: ModelRunner) -> torch.Tensor:
    """Logits and hidden states of some layers."""
    text = random_ids(12, seed=3, vocab_size=runner.config.vocab_size)
    sequence = runner.sequences.open(20)
    layers = (1, 0, runner.config.num_layers, LAST_HIDDEN_STATE)
    logits, states = runner.forward_batch(RowBatch.of([ForwardRow(sequence, text, 12)]), layers)
    assert states.shape == (12, 4 * runner.config.hidden_size)
    return torch.cat([logits, states], dim=-1)


def check(folder: Path, rank: int) -> None:
    read: list[tuple[int, int]] = []
    settings = {"dtype": "float32", "page_size": 4, "num_pages": 60}
    whole_read: list[tuple[int, int]] = []
    alone = ModelRunner.load(folder, **settings, progress=lambda *at: whole_read.append(at))  # type: ignore[arg-type]
    shared = ModelRunner.load(folder, **settings, progress=lambda *at: read.append(at), ranks=BothRun(rank))  # type: ignore[arg-type]
    expected = logits_of(alone)
    torch.testing.assert_close(logits_of(shared), expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)
    expected = states_of(alone)  # of a stream that is not normalised
    torch.testing.assert_close(states_of(shared), expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)
    whole, part = alone.worker.model, shared.worker.model
    copied = sum(tensor.nbytes for tensor in held_by_all(part))
    # Its half of every matrix, but for key and value heads that are fewer than ranks, and a row of padding.
    layers = [whole.config.of_layer(layer) for layer in range(whole.config.num_layers)]
    spare = sum((len(part.shard.kv_heads(own)) * SIZE - own.num_kv_heads) * own.head_dim for own in layers)
    allowed = spare * whole.config.hidden_size * 4 * 2 + 4 * whole.config.hidden_size * 4
    assert read[-1][1] <= (whole_read[-1][1] + copied) / SIZE + allowed, (read[-1], whole_read[-1], copied, allowed)
    for own, every in zip(shared.kv_cache.groups, alone.kv_cache.groups, strict=True):
        assert own.shape[3] == max(1, every.shape[3] // SIZE)


def check_made(folder: Path, rank: int, load_format: LoadFormat) -> None:
    """Weights that are made where they are used: the parts are those of the whole."""
    settings = {"dtype": "float32", "page_size": 4, "num_pages": 60, "load_format": load_format}
    alone = ModelRunner.load(folder, **settings)  # type: ignore[arg-type]
    shared = ModelRunner.load(folder, **settings, ranks=BothRun(rank))  # type: ignore[arg-type]
    expected = logits_of(alone)
    torch.testing.assert_close(logits_of(shared), expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)


def check_fp8(source: Path, form: str, rank: int) -> None:
    """Scales of whole blocks, tensors and rows: the parts round their inputs as the whole does."""
    with tempfile.TemporaryDirectory() as place:
        folder = quantize_folder(source, Path(place) / "fp8", FORMATS[form])
        check_logits(folder, rank)
        if "moe" in source.name:
            check_whole_experts(folder, rank)


def check_logits(folder: Path, rank: int, **more: Any) -> None:
    settings: dict[str, Any] = {"dtype": "float64", "page_size": 4, "num_pages": 60, **more}
    ranks = BothRun(rank)
    alone, shared = ModelRunner.load(folder, **settings), ModelRunner.load(folder, **settings, ranks=ranks)
    if shared.kv_cache.dtype == FP8:
        measure_kv_scales(alone.worker)
        measure_kv_scales(shared.worker, ranks)
    torch.testing.assert_close(logits_of(shared), logits_of(alone), atol=TOLERANCE, rtol=0)


def check_mxfp4(source: Path, rank: int) -> None:
    """Experts are shared in whole groups of columns, of files and of noise."""
    with tempfile.TemporaryDirectory() as place:
        folder = mxfp4_models.quantize_folder(source, Path(place) / "mxfp4")
        check_logits(folder, rank)
        check_made(folder, rank, "dummy")
        check_whole_experts(folder, rank)


def check_whole_experts(folder: Path, rank: int) -> None:
    """Expert parallelism: no rank reads another's experts, and sums are those of the whole model."""
    settings: dict[str, Any] = {"dtype": "float64", "page_size": 4, "num_pages": 60}
    expected = logits_of(ModelRunner.load(folder, **settings))
    shared = ModelRunner.load(folder, **settings, ranks=BothRun(rank), enable_expert_parallel=True)
    torch.testing.assert_close(logits_of(shared), expected, atol=TOLERANCE, rtol=0)
    names = [name for name, _ in shared.worker.model.weights() if ".experts." in name]
    held = {int(name.split(".experts.")[1].split(".")[0]) for name in names}
    experts = shared.config.experts
    assert experts is not None
    assert held == set(range(experts.count)[rank * experts.count // SIZE : (rank + 1) * experts.count // SIZE])


class Measuring(NoGraphs):
    """Launches, which have a collective, and measures what it is told."""

    def __init__(self, peaks: Sequence[int]) -> None:
        self._peaks = iter(peaks)
        self.num_prepared = 0

    def prepare(self, launch: Callable[[], object]) -> int:
        launch()
        self.num_prepared += 1
        return next(self._peaks)


def sum_of_ranks(communicator: Communicator, number: int) -> torch.Tensor:
    return communicator.all_reduce(torch.tensor([float(number)]))


def check_captures(rank: int) -> None:
    """Ranks whose measures lie on both sides of the limit, or whose limits differ, capture the same graphs."""
    ranks, mib = BothRun(rank), 1 << 20
    peaks = ((300, 150, 120, 90, 10), (300, 120, 150, 90, 10))[rank]
    limits = ((130, 130), (110, 400), (400, 60), (400, 400))
    kept = [(False, False, False, True, True), (False, False, False, True, True), (False,) * 4 + (True,), (True,) * 5]
    for both, expected in zip(limits, kept, strict=True):
        recorder = Measuring([mib * peak for peak in peaks])
        bound = CaptureBound(CaptureLimits(mib * both[rank]), len(peaks), ranks.least)
        communicator = ranks.open_communicator(torch.device("cpu"), torch.float32)
        for number, is_kept in enumerate(expected):
            launch = functools.partial(sum_of_ranks, communicator, number)
            captured = bound.capture(recorder, launch)
            assert (captured is not None) == is_kept, (both, number, rank)
            assert captured is None or captured() == SIZE * number
        assert recorder.num_prepared == len(peaks)


def check_exchanges(rank: int) -> None:
    """Token ids that only rank 0 has, and parts of rows that are gathered by a sum, arrive bit for bit."""
    communicator = CpuCommunicator(Shard(rank, SIZE), lambda error: None)
    for count in (1, 4, 7):
        token_ids = torch.arange(2**24 - count, 2**24, dtype=torch.int32)
        given = None if rank else token_ids
        torch.testing.assert_close(broadcast_token_ids(communicator, given, count, token_ids.device), token_ids)
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows[0, 0], rows[1, 7], rows[2, 3] = float("inf"), float("nan"), torch.finfo(dtype).max
        part = rows[:, 5 * rank : 5 * (rank + 1)]
        torch.testing.assert_close(gather_by_sum(communicator, part), rows, rtol=0, atol=0, equal_nan=True)
        assert gather_by_sum(SINGLE_RANK, rows) is rows


def check_refused_types(rank: int) -> None:
    """Sums of a type that torch's one-shot kernel does not take are not tried again, on any rank."""

    def is_right(device: torch.device, dtype: torch.dtype) -> bool:
        raise RuntimeError(f"not implemented for {dtype}")

    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(is_right=is_right)
        patch.setattr(device_communicators, "open_symmetric_memory", lambda shard, device: found)
        refused = device_communicators.try_symmetric_memory(Shard(rank, SIZE), torch.device("cpu"), torch.float16)
    assert refused is None


def held_by_all(decoder: Decoder) -> Iterator[torch.Tensor]:
    """Convolutions, norms, routers, per-layer inputs, and the biases of sums. Sinks are shared, in float32."""
    yield decoder.norm.weight
    yield from (torch.empty(to.shape) for name, to in decoder.weights() if "per_layer" in name or "_scalar" in name)
    for layer in decoder.layers:
        yield from (norm.weight for norm in layer.norms.values())
        if isinstance(layer.attention, Attention) and layer.attention.qk_norm is not None:
            yield layer.attention.qk_norm
        for name, target in layer.attention.weights():
            if name in {"conv1d.weight", "norm.weight"}:
                yield torch.empty(target.shape)
        assert isinstance(layer.attention, Attention | GatedDeltaNet)
        block, linears = layer.feed_forward, [layer.attention.output]
        if isinstance(block, MlpWithExperts) and decoder.config.experts is not None:
            yield torch.empty(5 * decoder.config.hidden_size + decoder.config.experts.count)  # norms and factors
            linears.append(block.mlp.down)
            block = block.experts
        assert isinstance(block, GatedMlp | SparseMlp)
        if isinstance(block, SparseMlp) and decoder.config.experts is not None:
            has_bias = decoder.config.experts.has_bias
            yield torch.empty(decoder.config.experts.count, decoder.config.hidden_size + has_bias)  # the router
            yield torch.empty(decoder.config.hidden_size)  # the gate of a shared expert
        for linear in (*linears, block.down):
            if (bias := linear.method.parameters().get("bias")) is not None:
                yield bias.tensor


def check_through_transformers(folder: Path, rank: int) -> None:
    """Linear layers shared by transformers' plan: logits and states are those of the whole model."""
    settings: dict[str, Any] = {"dtype": "float32", "page_size": 4, "num_pages": 60}
    alone, shared = (ModelRunner.load(folder, **settings, ranks=ranks) for ranks in (None, BothRun(rank)))
    torch.testing.assert_close(logits_of(shared), logits_of(alone), atol=1e-4, rtol=0)
    expected = states_of(alone)
    torch.testing.assert_close(states_of(shared), expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)
    whole, part = (runner.worker.model.kv_cache_layout.bytes_per_token(4) for runner in (alone, shared))
    assert part * SIZE == whole


def main(store: str, rank: int, synthetic: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    check_captures(rank)
    check_exchanges(rank)
    check_refused_types(rank)
    ropes = {f"llama-{name}" for name in SCALED_ROPES}  # of which every rank has all
    for name, (architecture, config) in {**MODELS, **MORE}.items():
        if name in ropes:
            continue
        try:
            check(build(architecture, **config), rank)
        except Exception as error:
            raise AssertionError(name) from error
    for form in ("compressed blocks", "tensor, static", "weights alone"):
        for architecture, config in FP8_MODELS.values():
            check_fp8(build(architecture, **config), form, rank)
    check_logits(build("qwen3"), rank, kv_cache_dtype="fp8")
    for architecture, config in EXPERT_PARALLEL.values():
        check_whole_experts(build(architecture, **config), rank)
    check_mxfp4(build(MXFP4_MODEL[0], **MXFP4_MODEL[1]), rank)
    for name in THROUGH_TRANSFORMERS:
        check_through_transformers(build_fallback(name), rank)
    for architecture, config in MADE.values():
        check_made(build(architecture, **config), rank, "dummy")
    check_made(Path(synthetic), rank, "synthetic")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
