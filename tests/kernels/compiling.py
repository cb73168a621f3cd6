"""Compiles every Triton kernel without a GPU, for the oldest hardware that is served; prints its name, the capability,
and whether it waits for the kernel before it. ``compiling_uses`` has newer hardware.

Run as a module, in a process in which Triton does not interpret.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.kernels.copy_inputs.kernel import _copy_inputs_kernel
from outrider.kernels.draft_advance.kernel import _advance_kernel
from outrider.kernels.draft_sampling.kernel import (
    _finish_kernel,
    _gather_kernel,
    _histogram_kernel,
    _reduce_kernel,
)
from outrider.kernels.embedding.kernel import _look_up_kernel
from outrider.kernels.experts.kernel import _grouped_kernel
from outrider.kernels.experts.routing import _route_kernel, _tile_kernel
from outrider.kernels.fp8_linear.kernel import _fp8_kernel
from outrider.kernels.fp8_linear.rounding import _norm_and_round_kernel, _round_kernel
from outrider.kernels.gated_delta.chunks import _chunk_kernel, _follow_kernel
from outrider.kernels.gated_delta.kernel import _convolve_kernel, _delta_kernel, _gated_norm_kernel, _log_kernel
from outrider.kernels.gemv.kernel import _gated_kernel, _product_kernel, _qkv_rope_kernel
from outrider.kernels.kv_store_kernel import _store_kernel
from outrider.kernels.linear.ordered import _ordered_kernel
from outrider.kernels.linear.skinny import _skinny_kernel
from outrider.kernels.linear.split_k import _split_k_gate_kernel, _split_k_kernel, _sum_partials_kernel
from outrider.kernels.linear.stream_k import _stream_k_kernel
from outrider.kernels.paged_attention.chunks import _attend_chunks_kernel
from outrider.kernels.paged_attention.invariant import _attend_segments_kernel
from outrider.kernels.paged_attention.kernel import _attend_kernel
from outrider.kernels.paged_attention.prompts import _join_kernel
from outrider.kernels.paged_attention.schedule import _schedule_kernel
from outrider.kernels.paged_attention.segment_schedule import _segment_schedule_kernel
from outrider.kernels.rms_norm.kernel import _norm_kernel
from outrider.kernels.rope_and_cache.kernel import _rope_and_cache_kernel
from outrider.kernels.scoring.cutting import _cut_kernel
from outrider.kernels.scoring.grouping import _group_kernel
from outrider.kernels.scoring.kernel import _answer_kernel, _entropy_kernel
from outrider.kernels.sum_norm.kernel import _sum_norm_kernel
from outrider.kernels.swiglu.kernel import _swiglu_kernel
from outrider.kernels.token_mask.kernel import _mask_kernel

HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128}
ATTENTION = {
    "PAGE_SIZE": 16,
    "GROUP": 4,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "HAS_WINDOW": True,
    "SINKS": 4,
    "SOFTCAP": 0.0,
    "sink_logits_ptr": None,
    "value_scale": None,
}
SCALES = {"inverse_key_scale": None, "inverse_value_scale": None}
TILE = {
    "BLOCK_M": 32,
    "BLOCK_N": 64,
    "BLOCK_D": 128,
    "PRECISION": "tf32",
    "STAGES": 2,
    "UNROLLED": 4,
    "IS_SCHEDULED": True,
}
CHUNKS = {"LARGE_M": 64, "SMALL_M": 32, "BLOCK_N": 64, "BLOCK_D": 128, "ROWS": 256, "LEAST_BLOCKS": 4, "STAGES": 3}
PRODUCT = {"K": 4096, "HAS_BIAS": True, "SPLITS": 2, "FETCHED": 256}
STREAMED = {"K": 4096, "FETCHED": 128, "WIDTH": 128, "REST": 32, "HAS_REST": True, "BLOCK_N": 64, "BLOCK_K": 64}
FEW = {"NUM_TOKENS": 2, "HAS_BIAS": True}
PARTS = {"PARTS": 126, "BLOCK_PARTS": 128}
SUPPORT = {"LIMIT": 1024, "CAPACITY": 2048}
CONSTANTS: dict[Any, dict[str, Any]] = {
    _norm_kernel: {"NUM_PARTIALS": 2, "BLOCK": 4096},
    _sum_norm_kernel: {"RANK": 1, "SIZE": 2, "ROWS": 32, "FLAG_BYTES": 256, "BLOCK": 4096},
    _mask_kernel: {"BLOCK": 4096},
    _store_kernel: {"BLOCK_H": 8, "BLOCK_D": 128},
    _swiglu_kernel: {"BLOCK": 1024, "IS_GELU": False, "ALPHA": 1.7, "LIMIT": 7.0},
    _rope_and_cache_kernel: {
        **HEADS,
        **SCALES,
        "NUM_PARTIALS": 1,
        "HAS_ROWS": True,
        "HAS_NORM": True,
        "BLOCK_H": 4,
        "BLOCK_HALF": 64,
    },
    _attend_kernel: {**ATTENTION, **TILE},
    _schedule_kernel: {
        "GROUP": 4,
        "HAS_WINDOW": True,
        "SINKS": 4,
        "BLOCK_M": 32,
        "BLOCK_N": 64,
        "ROWS": 256,
        "PARTS": 32,
    },
    _segment_schedule_kernel: {
        "GROUP": 4,
        "HAS_WINDOW": True,
        "SINKS": 4,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "ROWS": 256,
        "PARTS": 32,
    },
    _attend_segments_kernel: {
        **ATTENTION,
        "BLOCK_M": 64,
        "SLOT_M": 16,
        "BLOCK_N": 64,
        "BLOCK_D": 128,
        "PRECISION": "tf32",
        "STAGES": 2,
        "UNROLLED": 4,
    },
    _ordered_kernel: {
        **{key: value for key, value in STREAMED.items() if key not in {"REST", "HAS_REST"}},
        "PARTS": 2,
        "IS_GATED": False,
        "HAS_BIAS": True,
        "BAND": 8,
    },
    _attend_chunks_kernel: {**ATTENTION, **CHUNKS},
    _join_kernel: {"NUM_HEADS": 32, "HEAD_DIM": 128, "BLOCK_H": 8, "BLOCK_D": 128},
    _skinny_kernel: {**PRODUCT, "BLOCK_T": 16, "BLOCK_N": 64, "BLOCK_K": 256, "PRECISION": "tf32"},
    _split_k_kernel: {**STREAMED, "SPLITS": 2},
    _stream_k_kernel: STREAMED,
    _split_k_gate_kernel: {**STREAMED, "HAS_BIAS": True},
    _sum_partials_kernel: {"HAS_BIAS": True, "SPLITS": 2, "BLOCK": 2048},
    _look_up_kernel: {"BLOCK": 2048},
    _route_kernel: {
        **{"NUM_EXPERTS": 60, "NUM_CHOSEN": 4, "NORMALIZES": True, "IS_ALONE": True, "BLOCK_E": 64, "BLOCK_A": 4},
        **{"NUM_GROUPS": 4, "GROUPS_CHOSEN": 2, "SCALE": 2.5},
    },
    _tile_kernel: {"WIDTH": 16, "BLOCK_E": 128, "BLOCK": 1024},
    _grouped_kernel: {
        **{"K": 2000, "X_GROUPS": 0, "WEIGHT_GROUPS": 0, "SCALE_ROWS": 1, "IS_ROUNDED": True, "HAS_BIAS": True},
        **{"IS_WEIGHTED": True, "PARTS": 1, "WIDTH": 32, "BLOCK_N": 64, "BLOCK_K": 128},
        **{"IS_MXFP4": False, "IS_FAST": False},
    },
    _delta_kernel: {
        **{"NUM_HEADS": 32, "NUM_KEY_HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "LOG": 64},
        **{"KEYS": 128, "VALUES": 32, "IN_CHUNKS": True},
    },
    _convolve_kernel: {
        **{"NUM_HEADS": 32, "NUM_KEY_HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "LOG": 64, "TAPS": 4},
        **{"WIDTH": 128, "TOKENS": 4, "IN_CHUNKS": True},
    },
    _chunk_kernel: {
        **{"NUM_HEADS": 48, "NUM_KEY_HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "LOG": 64, "TAPS": 4, "KEYS": 128},
        **{"VALUES": 128, "LEVELS": 6, "ROWS": 256, "PRECISION": "tf32"},
    },
    _follow_kernel: {
        **{"NUM_HEADS": 48, "NUM_KEY_HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "LOG": 64, "KEYS": 128},
        **{"VALUES": 32, "LEVELS": 6, "PRECISION": "tf32"},
    },
    _log_kernel: {"LOG": 64, "BLOCK": 1024},
    _gated_norm_kernel: {"NUM_HEADS": 32, "VALUE_DIM": 128, "VALUES": 128},
    _copy_inputs_kernel: {"BLOCK": 2048},
    _advance_kernel: {"PAGE_SIZE": 16, "ROWS": 256},
    _product_kernel: {**FEW, "BLOCK_N": 4, "BLOCK_K": 8192},
    _gated_kernel: {**FEW, "HAS_DELTA": True, "BLOCK_N": 8, "BLOCK_K": 2048},
    _qkv_rope_kernel: {**FEW, **HEADS, **SCALES, "HAS_DELTA": True, "HAS_ROWS": True, "BLOCK_N": 8, "BLOCK_K": 2048},
    _reduce_kernel: {"PARTS": 126, "CHUNK": 1024},
    _histogram_kernel: {**PARTS, "CHUNK": 1024},
    _gather_kernel: {**PARTS, **SUPPORT, "MASS": 0.999, "CHUNK": 1024},
    _finish_kernel: {**PARTS, **SUPPORT, "MASS": 0.999, "PLACED": 16, "COMPARED": 128, "FEW": 256},
}
FP8_CONSTANTS: dict[Any, dict[str, Any]] = {
    _round_kernel: {
        "IS_GATED": True,
        "IS_GELU": False,
        "IS_STATIC": False,
        "GROUP": 128,
        "BLOCK": 128,
        "GROUPS": 8,
    },
    _norm_and_round_kernel: {"NUM_PARTIALS": 2, "IS_STATIC": False, "GROUP": 128, "BLOCK": 4096, "GROUPS": 32},
    _fp8_kernel: {
        **{"K": 4096, "SPLITS": 2, "IS_SPLIT": False, "X_GROUPS": 32, "WEIGHT_GROUPS": 32, "SCALE_ROWS": 128},
        **{"IS_ROUNDED": True, "HAS_BIAS": True, "WIDTH": 32, "BLOCK_N": 64, "BLOCK_K": 128},
    },
}
"""Constants for hardware with FP8 numbers: 8.9 has them, 8.0 has not."""
OPTIONS: dict[Any, dict[str, Any]] = {
    _attend_chunks_kernel: {"num_warps": 8},
    _chunk_kernel: {"num_warps": 8, "num_stages": 1},
    _follow_kernel: {"num_warps": 8, "num_stages": 1},
    _cut_kernel: {"num_warps": 8},
}
"""Options of launches whose tiles do not fit the registers of four warps: compiling what is spilled takes long."""
WITH = {"HAS_COUPLED": True, "HAS_MARKS": True, "FAST": True}
FEWEST = {"GROUPS": 128, "IDS": 128}
CONSTANTS |= {
    _group_kernel: {**WITH, "HAS_CUTS": True, "PACKED": True, "IDS": 128},
    _entropy_kernel: {"GROUPS": 128},
    _answer_kernel: {**WITH, **FEWEST},
    _cut_kernel: {**FEWEST, "FAST": True, "TOPS": 16384, "RUNS": 1024, "GATHERED": 2048, "BITS": 16},
}
INTEGERS = {
    "schedule", "slots", "rows", "query_starts", "context_lengths", "page_starts", "pages", "counters", "parameters",
    "best_ids", "ids", "histogram", "candidates", "places", "next_ids", "records", "supports",
    "rounds", "num_rows", "step", "positions", "contexts", "marks", "found", "counts", "chosen",
    "group_masses", "box", "words", "numbers", "order", "tiles", "lengths", "starts", "ends", "token_slots",
}  # fmt: skip
REALS = {
    "sums", "partials", "stats", "groups", "parts", "left_sum", "right_sum", "out_sum",
    "x_scales", "weight_scales", "scales", "scale", "shares", "weights",
    "states", "taps", "decay", "queries", "keys", "systems",
}  # fmt: skip
FLOATS = ("eps", "scale", "floor")
TILES = {
    "x_desc": "tensordesc<bf16[128, 64]>",
    "rest_desc": "tensordesc<bf16[32, 64]>",
    "weight_desc": "tensordesc<bf16[64, 64]>",
    "inputs_desc": "tensordesc<fp8e4nv[32, 128]>",
    "numbers_desc": "tensordesc<fp8e4nv[64, 128]>",
}
WIDE = {"masses": "*fp64", "addresses": "*i64"}


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        stem = name.removesuffix("_ptr")
        if stem in WIDE:
            return WIDE[stem]
        if stem == "rounded":
            return "*fp8e4nv"
        return "*i32" if stem in INTEGERS else "*fp32" if stem in REALS else "*bf16"
    if name in TILES:
        return TILES[name]
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(kernel: Any, constants: dict[str, Any], capability: int, form: str = "ptx") -> str:
    """The compiled kernel in one of the compiler's forms."""
    known = {**constants, "PDL": capability >= 90}
    signature = {name: "constexpr" if name in known else type_of(name) for name in kernel.arg_names}
    source, target = ASTSource(kernel, signature, known), GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=OPTIONS.get(kernel))
    return str(compiled.asm[form])


if __name__ == "__main__":
    for kernel, constants in {**CONSTANTS, **FP8_CONSTANTS}.items():
        ptx = compile_kernel(kernel, constants, 89 if kernel in FP8_CONSTANTS else 80)
        sys.stdout.write(f"{kernel.__name__} {'griddepcontrol.wait' in ptx}\n")
