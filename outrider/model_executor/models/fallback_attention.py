"""Attention of transformers' modules over our paged KV cache.

transformers finds it by name. Inputs of a forward are an attribute of the modules, which all hold the model's
``Current``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.errors import ModelError
from outrider.kernels.kv_store import store_heads
from outrider.kernels.paged_attention import paged_attention
from outrider.kv_cache import KVCacheSpec
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import AttentionInputs

NAME = "outrider_paged"
HOLDER = "outrider_current"
_KNOWN = ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "is_causal")
"""Arguments of attention functions that ours knows; others but flags may change the result."""


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """Attention of a forward of one token without a cache: learns the layers' shapes."""

    window: int | None
    specs: dict[int, KVCacheSpec] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Record the layer, and let the token see itself: [1, 1, H, D]."""
        given = (name for name, option in options.items() if option is not None and not isinstance(option, bool))
        if refused := [name for name in given if name not in _KNOWN]:
            raise ModelError(f"attention with {', '.join(refused)} is not supported")
        sinks = options.get("s_aux")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ModelError(f"{query.shape[1]} heads have {tuple(sinks.shape)} learned sinks")
        if layer in self.specs:
            raise ModelError(f"layer {layer} attends twice")
        head_dim = max(key.shape[3], value.shape[3])
        self.specs[layer] = KVCacheSpec(key.shape[1], head_dim, options.get("sliding_window"))
        self.keys[layer] = key
        return value.transpose(1, 2).repeat_interleave(query.shape[1] // key.shape[1], 2)

    def sources(self) -> list[int]:
        """Index, for each layer, of the one whose keys and values it reads: its own, or an earlier one."""
        found: list[int] = []
        for layer, spec in sorted(self.specs.items()):
            source = next(one for one in sorted(self.keys) if self.keys[one] is self.keys[layer])
            if self.specs[source] != spec:
                raise ModelError(f"layer {layer} reads the keys of layer {source} in another window")
            found.append(source)
        return found


@dataclass(slots=True)
class CacheScales:
    """See ``KVScaled``."""

    kv_scales: tuple[float, float] = (1.0, 1.0)

    def set_kv_scales(self, key_scale: float, value_scale: float) -> None:
        """Set both."""
        self.kv_scales = key_scale, value_scale


@dataclass(frozen=True, slots=True)
class Paged:
    """Attention of a forward over the cache."""

    kv_cache: KVCacheTensors
    inputs: Sequence[AttentionInputs]
    """Attention inputs of the layers of the cache."""
    indices: Sequence[int]
    """Index of the cache layer that each layer of the model reads."""
    scales: Sequence[CacheScales]
    """Scales of the layers of an FP8 cache."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Store the tokens' keys and values unless a layer before has, and attend: [1, T, H, D of values]. Where keys
        and values differ in size, as with latent attention, zeros fill up the smaller ones.
        """
        place = self.indices[layer]
        kv, inputs, scales = self.kv_cache.layer(place), self.inputs[place], self.scales[place].kv_scales
        queries, keys, values = (_filled(part[0].transpose(0, 1), kv.shape[-1]) for part in (query, key, value))
        if place not in self.indices[:layer]:
            store_heads(kv, inputs.slots, keys, values, scales=scales)
        scale = (options.get("scaling") or query.shape[-1] ** -0.5) * scales[0]
        sinks: torch.Tensor | None = options.get("s_aux")
        found = paged_attention(
            queries.contiguous(), kv, inputs.plan, scale=scale, softcap=options.get("softcap"),
            sink_logits=None if sinks is None else sinks.float(), value_scale=None if scales[1] == 1.0 else scales[1],
        )  # fmt: skip
        return found[None, ..., : value.shape[-1]]


def _filled(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Heads [T, H, D] as [T, H, size], with zeros behind."""
    return heads if heads.shape[-1] == size else torch.nn.functional.pad(heads, (0, size - heads.shape[-1]))


@dataclass(slots=True)
class Current:
    """Attention of the forward that runs; every attention module of a model holds the same one."""

    attention: AttentionProbe | Paged | None = None
    given: torch.Tensor | None = None
    """Output of the decoder if it is not run: [1, T, hidden]."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it, to [1, T, H, D]."""
    current: Current | None = getattr(module, HOLDER, None)
    if current is None or current.attention is None or not isinstance(module.layer_idx, int):
        raise ModelError("its attention layers have no number")
    is_causal = options.get("is_causal")
    if attention_mask is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError("it has attention masks of its own")
    return current.attention.attend(module.layer_idx, query, key, value, options), None


def register() -> str:
    """Make our attention known to transformers; returns its name."""
    AttentionInterface.register(NAME, _attention)
    return NAME
