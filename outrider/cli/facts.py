"""Facts of what is served, as lines for people: the ready lines of ``serve`` and the table of ``info``."""

from __future__ import annotations

from outrider.generation import ModelPlacement

_PAIR = 2
"""Ranks up to which batch-invariant sums were compared on GPUs."""


def device_text(device: str, size: int, name: str = "") -> str:
    """A device, and the GPU's name where it is known: "cuda:0-3 (4 x NVIDIA H200)"."""
    kind, _, first = device.partition(":")
    start = int(first or 0)
    if kind != "cuda":
        return device if size == 1 else f"{device} ({size} processes)"
    if size == 1:
        return f"cuda:{start} ({name})" if name else f"cuda:{start}"
    return f"cuda:{start}-{start + size - 1}" + (f" ({size} x {name})" if name else "")


def placement_text(placement: ModelPlacement) -> str:
    """Placement of one replica of a model, with its role and cache; empty for a draft without a model."""
    if not placement.device:
        return ""
    where = device_text(placement.device, placement.tensor_parallel_size, placement.device_name)
    mode = "batch-invariant" if placement.batch_invariant else ""
    kept = ", ".join(fact for fact in (placement.dtype, placement.quantization, mode) if fact)
    return f"{where}, {kept}, KV cache {placement.kv_cache_tokens:,} tokens"


def model_text(name: str, placement: ModelPlacement) -> str:
    """A model and where it runs."""
    where = placement_text(placement)
    return f"{name} on {where}" if where else name


def repetition_text(target: ModelPlacement) -> str:
    """Exactness of the output, as a phrase."""
    if not target.batch_invariant:
        return "that of the target alone; near ties may depend on the batch"
    untried = " (sums of more than two ranks were compared on CPUs only)" if target.tensor_parallel_size > _PAIR else ""
    return f"that of the target alone; greedy and coupled the same in any batch{untried}"


def draft_length_text(num_speculative_tokens: int, mode: str, *, disable_by_batch_size: int = 0) -> str:
    """Draft tokens of a step. ``disable_by_batch_size``: requests with which nothing is drafted; 0: no such number."""
    if disable_by_batch_size == 1:
        return "none, since disable_by_batch_size 1 turns them off for every request"
    limit = f", with fewer than {disable_by_batch_size} requests" if disable_by_batch_size else ""
    if num_speculative_tokens == 0:
        return f"none, unless a request asks for some by num_speculative_tokens{limit}"
    if mode == "fixed":
        return f"{num_speculative_tokens} tokens in each step{limit}"
    return f"up to {num_speculative_tokens} tokens a step, by expected throughput{limit}"
