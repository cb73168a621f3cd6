"""Compiles every Triton kernel as real models launch it, without a GPU; prints each kernel's name and what it takes.

Tensors are fake: they have a GPU's name, sizes, types and alignment and no memory. So the host's own code decides what
is launched, with which constants and specialised in which way; a launch ends when its kernel is compiled. What is
captured as a graph must need no kernel that preparing it did not, and no batch one that the warm-up did not. Run as a
module, in a process in which Triton does not interpret.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.kernels import launching
from outrider.kernels.fp8_linear import FP8
from outrider.kernels.kv_store_kernel import store_heads
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kernels.paged_attention.prompts import join
from outrider.kernels.scoring.launching import launch_kernels
from outrider.kernels.scoring.rows import RowFlags, Rows, ask, every_kind, place
from outrider.kernels.sum_norm import SharedRows
from outrider.kernels.sum_norm.kernel import sum_and_norm
from outrider.kernels.token_mask.kernel import mask_tokens
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, unpack
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.draft_loop.loop import DraftLoop, StepShape
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.quantization import MXFP4, ONLINE, Activations, Quantization, Scales
from outrider.model_executor.models import Decoder, ModelConfig
from outrider.model_executor.models.config import (
    ExpertNames,
    ExpertsConfig,
    RecurrentConfig,
    RopeConfig,
    SwigluClamp,
    Variant,
)

GPU = torch.device("cpu")  # in name: a build of torch without CUDA makes no fake tensors on one
PROCESSORS = 132
LARGEST_SHARED_BYTES = 227 << 10
"""Largest shared memory of one program on a GPU of capability 9.0."""
PAGE_SIZE, NUM_PAGES, PAGES, NUM_STATE_SLOTS = 16, 64, 40, 8
OUTSIDE = RowFlags.DRAWS | RowFlags.EXCLUDES
BLOCKS = Quantization("fp8", Scales.BLOCK, Activations.GROUP, scale_name="weight_scale_inv")
ALL = OUTSIDE | RowFlags.COUPLED | RowFlags.CUTS | RowFlags.ENTROPY
"""Flags of a mixed batch."""


class Hopper:
    """Stand-in for the driver that Triton asks before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only() -> set[str]:
    """Every launch ends when its kernel is compiled; returns what will hold the kernels."""
    run = JITFunction.run
    seen: set[str] = set()

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            assert kernel.metadata.shared <= LARGEST_SHARED_BYTES, (self.__name__, kernel.metadata.shared)
            if self.__name__ == "_attend_segments_kernel":  # columns are added up in one order, whatever the tile
                assert "kWidth = 4" not in kernel.asm["ttgir"]
            waits = "griddepcontrol.wait" in kernel.asm["ptx"]
            sys.stdout.write(f"{self.__name__} {waits} {kernel.metadata.shared}\n")
        return kernel

    driver.set_active(Hopper())
    stand_ins: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", compiled),
        (launching, "_interprets", lambda: True),
        (launching, "launches_early", lambda device: True),
        (launching, "_CPU_PROCESSORS", PROCESSORS),
        (FakeTensor, "is_cuda", property(lambda self: True)),
        (FakeTensor, "data_ptr", lambda self: self.storage_offset() * self.element_size()),
    ]
    for owner, name, value in stand_ins:
        setattr(owner, name, value)
    return seen


def config(**changes: Any) -> ModelConfig:
    """A 1B shape, cut to one layer."""
    plain = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=1,
        num_heads=32, num_kv_heads=8, head_dim=64, max_position=4096, rms_norm_eps=1e-5, qkv_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=False, tied_embeddings=False, sliding_windows=(None,),
        rope=RopeConfig("default", 500_000.0), eos_token_ids=(), bos_token_id=None, dtype=torch.bfloat16,
    )  # fmt: skip
    return replace(plain, **changes)


class Model:
    """A decoder without weights, over a cache without memory."""

    def __init__(
        self, dtype: torch.dtype, *, batch_invariant: bool = False, cached: torch.dtype | None = None, **changes: Any
    ) -> None:
        self.decoder = Decoder(config(**changes), dtype=dtype, device=GPU, batch_invariant=batch_invariant)
        layout = self.decoder.kv_cache_layout
        self.cache = KVCacheTensors(
            layout,
            NUM_PAGES * PAGE_SIZE,
            dtype=cached or dtype,
            device=GPU,
            num_state_slots=NUM_STATE_SLOTS,
            state_dtype=dtype,
        )
        counters = torch.zeros(num_counters(PROCESSORS), dtype=torch.int32, device=GPU)
        self.frame = BatchFrame(
            PAGE_SIZE, layout.windows, counters, batch_invariant=batch_invariant, has_states=layout.states is not None
        )

    def forward(self, shape: BatchShape, num_logits: int) -> torch.Tensor:
        """Forward of this shape as a ``ModelRunner`` runs it."""
        size = shape.num_fixed + self.frame.num_of_states(shape.num_rows) + PAGES
        buffer = torch.empty(size, dtype=torch.int32, device=GPU)
        return self.decoder(unpack(buffer, shape, self.frame, num_logits), self.cache)

    def draft(self, shape: StepShape) -> None:
        """A step of a loop."""
        loop = DraftLoop(self.decoder, self.cache, self.frame, DraftingRules(), pages_per_row=PAGES)
        loop.launch(shape)

    def copy_inputs(self) -> None:
        """Arguments that each launch begins with."""
        PinnedInputBuffer(PAGES, GPU).copy_inputs()


def score(logits: torch.Tensor, flag: RowFlags, num_ids: int) -> None:
    """Every row with the same flag."""
    count = len(logits)
    parts = [place(0, 0, 0, 0, num_ids, 1), ask(flag)] * count
    rows = Rows.of(parts, np.zeros(count * num_ids, dtype=np.int32))
    launch_scoring(logits, rows)


def launch_scoring(logits: torch.Tensor, rows: Rows, *, wide: bool = False) -> None:
    launch_kernels(logits, torch.empty(rows.num_words, dtype=torch.int32, device=GPU), rows, wide=wide)


def sum_of_ranks() -> None:
    """Launches of two GPUs between an 8B model's blocks."""
    x, weight = (torch.empty(*shape, 4096, dtype=torch.bfloat16, device=GPU) for shape in ((5,), ()))
    addresses, rounds = torch.empty(2, dtype=torch.int64, device=GPU), torch.empty(32, dtype=torch.int32, device=GPU)
    sum_and_norm(x, torch.empty_like(x), weight, 1e-5, SharedRows(addresses, rounds, 1, 2, 32, 32 << 10))


def chunk_of_a_prompt() -> None:
    """Launch that joins a chunk's attention over its own keys with that over those before."""
    own, sums = torch.empty(4096, 32, 128, dtype=torch.bfloat16, device=GPU), torch.empty(32, 4096, device=GPU)
    join(own, sums, own.clone(), sums.clone())


def serve_target(seen: set[str], **changes: Any) -> None:
    """An 8B shape: first what is captured, then other batches, which need no other kernels."""
    target = Model(
        torch.bfloat16, hidden_size=4096, intermediate_size=14336, head_dim=128, vocab_size=64_000, **changes
    )
    for shape in map(
        BatchShape,
        (1, 1, 8, 24, 256, 16, 40, 64, 96, 160, 256, 4, 1),
        (1, 8, 8, 24, 256, 16, 40, 64, 96, 160, 512, 20, 9),
        (1, 8, 8, 1, 1, 17, 8, 8, 8, 8, 512, 8, 9),
    ):
        target.forward(shape, min(5, shape.num_tokens))
    warm = set(seen)
    for shape in map(BatchShape, (7, 65, 90, 3, 40, 2), (16, 448, 300, 3, 30, 19), (8, 128, 300, 1, 1, 17)):
        target.forward(shape, 1)
    assert seen == warm


def gpt_oss(*, batch_invariant: bool) -> Model:
    """Layers of gpt-oss-20b, with fewer experts."""
    experts = ExpertsConfig(
        8, 4, 2880, normalizes=True, layers=(True, True), names=ExpertNames(gate_up="gate_up_proj", router="router"),
        has_bias=True, clamp=SwigluClamp(1.702, 7.0),
    )  # fmt: skip
    return Model(
        torch.bfloat16, batch_invariant=batch_invariant, architecture="GptOssForCausalLM", experts=experts,
        hidden_size=2880, num_heads=64, qkv_bias=True, output_bias=True, num_layers=2, sliding_windows=(128, None),
        quantization=MXFP4, variant=Variant(has_sink_logits=True),
    )  # fmt: skip


def hybrid(**changes: Any) -> Model:
    """A recurrent layer of Qwen3.5 27B, and one with gated attention."""
    recurrent = RecurrentConfig(48, 16, 128, 128, 4, (True, False))
    return Model(
        torch.bfloat16, hidden_size=5120, intermediate_size=17408, num_heads=24, num_kv_heads=4, head_dim=256,
        num_layers=2, sliding_windows=(None, None), qk_norm=True, recurrent=recurrent,
        variant=Variant(norm_offset=1.0, has_output_gate=True),
        rope=RopeConfig("default", 10_000_000.0, partial=0.25), **changes,
    )  # fmt: skip


def compile_products_and_scoring(seen: set[str]) -> None:
    for quantization in (ONLINE, BLOCKS):
        serve_target(seen, quantization=quantization)
    logits = torch.empty(41, 128_256, dtype=torch.bfloat16, device=GPU)
    for rows in every_kind():
        launch_scoring(logits, rows)
    launch_scoring(logits, rows, wide=True)
    words = torch.empty(1, 4008, dtype=torch.int32, device=GPU)
    mask_tokens(logits, words[0, :1], words)
    warm = set(seen)
    for flag in (RowFlags(0), RowFlags.DRAWS, OUTSIDE, RowFlags.COUPLED, RowFlags.DRAWS | RowFlags.CUTS, ALL):
        score(logits, flag, 64 if flag & RowFlags.EXCLUDES else 0)
    assert seen == warm
    score(logits[1:].float(), RowFlags.DRAWS | RowFlags.ENTROPY, 1)


def compile_odd_shapes() -> None:
    """Biases, normalised heads, a window, odd sizes, the two other types."""
    odd: dict[str, Any] = {
        "vocab_size": 32_003,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_heads": 14,
        "num_kv_heads": 2,
    }
    Model(torch.float16, qkv_bias=True, **odd).draft(StepShape(1, 1))
    Model(torch.float32, qk_norm=True, sliding_windows=(512,), **odd).forward(BatchShape(4, 20, 8), 20)
    Model(torch.bfloat16, output_bias=True).forward(BatchShape(8, 40, 8), 1)
    product, kv = (torch.empty(sizes, dtype=torch.bfloat16, device=GPU) for sizes in ((5, 24, 64), (32, 2, 8, 64)))
    slots = torch.empty(5, dtype=torch.int32, device=GPU)
    store_heads(kv, slots, product[:, 8:16], product[:, 16:])
    store_heads(kv.to(torch.float8_e4m3fn), slots, product[:, 8:16], product[:, 16:])


def compile_experts_and_hybrids() -> None:
    experts: dict[str, Any] = {
        "architecture": "Qwen3MoeForCausalLM",
        "qk_norm": True,
        "experts": ExpertsConfig(128, 8, 768, normalizes=True, layers=(True,)),
    }
    for form in (None, ONLINE, BLOCKS):
        model = Model(torch.bfloat16, quantization=form, **experts)
        for shape in map(BatchShape, (1, 8, 32, 128, 8), (1, 8, 32, 128, 1024), (1, 1, 1, 1, 128)):
            model.forward(shape, 1)
    shared: dict[str, Any] = {
        "architecture": "Qwen3_5MoeForCausalLM",
        "experts": ExpertsConfig(64, 8, 512, normalizes=True, layers=(True, True), shared_size=512),
    }
    for model in (hybrid(), hybrid(quantization=BLOCKS), hybrid(batch_invariant=True), hybrid(**shared)):
        for shape in map(BatchShape, (1, 8, 32, 8), (1, 40, 32, 1024), (1, 5, 1, 128)):
            model.forward(shape, 1)


def compile_batch_invariance_and_fp8() -> None:
    for batch_invariant in (False, True):
        model = Model(torch.bfloat16, batch_invariant=batch_invariant, cached=FP8)
        attention = model.decoder.layers[0].attention
        assert isinstance(attention, Attention)
        attention.set_kv_scales(0.5, 0.25)
        for shape in map(BatchShape, (1, 8, 64, 8), (1, 8, 64, 500), (1, 1, 1, 300)):
            model.forward(shape, 1)
        model = gpt_oss(batch_invariant=batch_invariant)
        for shape in map(BatchShape, (1, 8, 32, 8), (1, 8, 32, 1024), (1, 1, 1, 128)):
            model.forward(shape, 1)
    in_any_batch = Model(torch.bfloat16, batch_invariant=True, hidden_size=4096, intermediate_size=14336, head_dim=128)
    for shape in map(BatchShape, (1, 8, 64, 8, 40), (1, 8, 64, 40, 500), (1, 1, 1, 5, 300)):
        in_any_batch.forward(shape, min(5, shape.num_tokens))
    Model(torch.float16, batch_invariant=True, head_dim=256).forward(BatchShape(2, 20, 10), 1)


def main() -> None:
    seen = compile_only()
    with FakeTensorMode(), torch.inference_mode():
        draft = Model(torch.bfloat16)
        draft.copy_inputs()
        for num_rows in (1, 2, 8, 24, 64, 256):
            draft.draft(StepShape(num_rows, 2))
            draft.draft(StepShape(num_rows, 1))
        serve_target(seen)
        compile_products_and_scoring(seen)
        compile_odd_shapes()
        compile_experts_and_hybrids()
        compile_batch_invariance_and_fp8()
        sum_of_ranks()
        chunk_of_a_prompt()


if __name__ == "__main__":
    main()
