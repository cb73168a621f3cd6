"""Cases of the kernels inside a layer but attention: products, normalisation, rotary, gate, copies of pages.

Sizes are an 8B model's on a GPU and tiny on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace, relative_error
from outrider.kernels.kv_store import copy_pages
from outrider.kernels.linear import prepare_weight
from outrider.kernels.rms_norm import prepare_norm
from outrider.kernels.rope_and_cache import CosSin, HeadLayout, apply_rope_and_cache
from outrider.kernels.rope_and_cache.reference import apply_rope_and_cache as reference_rope_and_cache
from outrider.kernels.swiglu import swiglu

PAGE_SIZE = 16
TOLERANCES = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class BenchmarkLayer:
    """Sizes of one model's layer."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int


def layer_sizes(place: KernelPlace) -> BenchmarkLayer:
    """Layer sizes to measure on this device."""
    return BenchmarkLayer(4096, 14336, 32, 8, 128, 1024) if place.is_large else BenchmarkLayer(128, 256, 4, 2, 32, 64)


def layer_cases(place: KernelPlace, *, num_rows: int, tokens_per_row: int) -> Iterator[KernelCase]:
    """All of them, for a batch of ``num_rows`` sequences with some tokens each."""
    sizes, num_tokens = layer_sizes(place), num_rows * tokens_per_row
    fused = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    shapes = {
        "qkv": (sizes.hidden, fused),
        "o": (sizes.num_heads * sizes.head_dim, sizes.hidden),
        "gate_up": (sizes.hidden, 2 * sizes.inner),
        "down": (sizes.inner, sizes.hidden),
    }
    for name, (inputs, outputs) in shapes.items():
        yield _linear(place, name, num_tokens, inputs, outputs)
    yield _gated(place, num_tokens, sizes)
    yield _norm(place, num_tokens, sizes.hidden)
    yield _swiglu(place, num_tokens, sizes.inner)
    yield _rotary(place, num_tokens, sizes)
    yield _page_copies(place, num_rows, sizes)


def _linear(place: KernelPlace, name: str, num_tokens: int, inputs: int, outputs: int) -> KernelCase:
    num_sets = 4 if place.is_large else 1
    weights = [place.random(outputs, inputs) / inputs**0.5 for _ in range(num_sets)]
    x = place.random(num_tokens, inputs)
    products = [prepare_weight(weight) for weight in weights]
    return KernelCase(
        f"linear {name}",
        f"{num_tokens} x {inputs} to {outputs}",
        (outputs * inputs + num_tokens * (inputs + outputs)) * x.element_size(),
        lambda i: products[i % num_sets](x, None),
        lambda: relative_error(products[0](x, None), x.double() @ weights[0].double().T),
        TOLERANCES[place.dtype],
    )


def _gated(place: KernelPlace, num_tokens: int, sizes: BenchmarkLayer) -> KernelCase:
    """Gate and up with what follows them, which some kernels do in one."""
    num_sets = 2 if place.is_large else 1
    shape = (2 * sizes.inner, sizes.hidden)
    weights = [place.random(*shape) / sizes.hidden**0.5 for _ in range(num_sets)]
    x = place.random(num_tokens, sizes.hidden)
    products = [prepare_weight(weight) for weight in weights]

    def difference() -> float:
        gate, up = (x.double() @ weights[0].double().T).chunk(2, -1)
        return relative_error(products[0].gated(x, None), F.silu(gate) * up)

    return KernelCase(
        "linear gate_up, gated", f"{num_tokens} x {sizes.hidden} to {sizes.inner}",
        weights[0].nbytes + x.nbytes + num_tokens * sizes.inner * x.element_size(),
        lambda i: products[i % num_sets].gated(x, None), difference, TOLERANCES[place.dtype],
    )  # fmt: skip


def _norm(place: KernelPlace, num_tokens: int, size: int) -> KernelCase:
    weight, x, delta = place.random(size), place.random(num_tokens, size), place.random(num_tokens, size)
    norm, zero = prepare_norm(weight, 1e-5), torch.zeros_like(delta)

    def difference() -> float:
        total = x.double() + delta.double()
        return relative_error(norm.after_adding(x.clone(), delta), F.rms_norm(total, (size,), weight.double(), 1e-5))

    return KernelCase(
        "norm", f"{num_tokens} x {size}", 4 * x.nbytes, lambda _: norm.after_adding(x, zero), difference,
        TOLERANCES[place.dtype],
    )  # fmt: skip


def _swiglu(place: KernelPlace, num_tokens: int, inner: int) -> KernelCase:
    gate_up = place.random(num_tokens, 2 * inner)

    def difference() -> float:
        gate, up = gate_up.double().chunk(2, -1)
        return relative_error(swiglu(gate_up.clone()), F.silu(gate) * up)

    return KernelCase(
        "swiglu", f"{num_tokens} x {inner}", gate_up.nbytes * 3 // 2, lambda _: swiglu(gate_up), difference,
        TOLERANCES[place.dtype],
    )  # fmt: skip


def _rotary(place: KernelPlace, num_tokens: int, sizes: BenchmarkLayer) -> KernelCase:
    layout = HeadLayout(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, 1e-5)
    qkv = place.random(num_tokens, (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim)
    kv = place.random(2 * num_tokens, 2, sizes.num_kv_heads, sizes.head_dim)
    index = torch.int32 if place.is_large else torch.int64
    slots = torch.randperm(2 * num_tokens, device=place.device)[:num_tokens].to(index)
    theta = torch.rand(num_tokens, 1, sizes.head_dim // 2, device=place.device) * 6
    cos, sin = theta.cos().repeat(1, 1, 2), torch.cat((-theta.sin(), theta.sin()), -1)
    cos_sin = CosSin(cos, sin, None) if place.is_large else CosSin(cos.to(place.dtype), sin.to(place.dtype), None)

    def difference() -> float:
        found_kv, true_kv = kv.clone(), kv.double()
        found = apply_rope_and_cache(qkv.clone(), found_kv, slots, cos_sin, layout, norm_weight=None)
        wide = CosSin(cos.double(), sin.double(), None)
        truth = reference_rope_and_cache(qkv.double(), true_kv, slots.long(), wide, layout, norm_weight=None)
        return max(relative_error(found, truth), relative_error(found_kv, true_kv))

    moved = (2 * sizes.num_heads + 4 * sizes.num_kv_heads) * sizes.head_dim * num_tokens * qkv.element_size()
    return KernelCase(
        "rotary and store", f"{num_tokens} tokens", moved,
        lambda _: apply_rope_and_cache(qkv, kv, slots, cos_sin, layout, norm_weight=None), difference,
        TOLERANCES[place.dtype],
    )  # fmt: skip


def _page_copies(place: KernelPlace, num_copies: int, sizes: BenchmarkLayer) -> KernelCase:
    num_layers = 32 if place.is_large else 2
    cache = place.random(num_layers, 2 * num_copies * PAGE_SIZE, 2, sizes.num_kv_heads, sizes.head_dim)
    copies = [(i, num_copies + i) for i in range(num_copies)]

    def difference() -> float:
        copy_pages(cache, copies, page_size=PAGE_SIZE)
        source, copied = cache.view(num_layers, 2, -1).unbind(1)
        return float(np.mean((source != copied).cpu().numpy()))

    return KernelCase(
        "copy of pages", f"{num_copies} pages of {num_layers} layers", cache.nbytes,
        lambda _: copy_pages(cache, copies, page_size=PAGE_SIZE), difference, 0.0, is_capturable=False,
    )  # fmt: skip
