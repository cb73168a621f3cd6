"""Decoder whose layers are transformers' modelling code, over our paged KV cache.

A forward is one row of tokens [1, T] of all sequences; what they attend to is our plan's. transformers finds our
attention by name; inputs of a forward reach it as an argument that its modules pass on. Each attention layer's shape
and window are learnt from what it asks for in a forward without a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.kernels.kv_store import store_kv
from outrider.kernels.paged_attention import paged_attention
from outrider.kv_cache import KVCacheLayout, KVCacheSpec
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.fallback_config import transformers_config
from outrider.model_executor.models.json_files import one_line, read_object
from outrider.types import LAST_HIDDEN_STATE

_NAME = "outrider_paged"
_ARGUMENT = "outrider_attention"
_REFUSED = ("s_aux", "sinks", "position_bias", "attn_bias", "block_table", "indices")
"""Arguments of attention functions that change the result and that ours does not know."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Attention of a forward without a cache: learns the layers' shapes."""

    window: int | None
    specs: dict[int, KVCacheSpec] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Record the layer, and let each token see itself: [T, H, D]."""
        refused = [name for name in _REFUSED if options.get(name) is not None]
        if refused or key.shape[-1] != value.shape[-1]:
            raise ModelError(f"attention with {', '.join(refused) or 'values of another size than keys'}")
        if layer in self.specs:
            raise ModelError(f"layer {layer} attends twice")
        self.specs[layer] = KVCacheSpec(key.shape[1], key.shape[2], options.get("sliding_window"))
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1)


@dataclass(frozen=True, slots=True)
class _Paged:
    """Attention of a forward over the cache."""

    kv_cache: KVCacheTensors
    inputs: Sequence[AttentionInputs]
    """Of each layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Store the tokens' keys and values, and attend: [T, H, D]."""
        kv, inputs = self.kv_cache.layer(layer), self.inputs[layer]
        store_kv(kv, inputs.slots.long(), torch.stack((key, value), dim=1).to(kv.dtype))
        return paged_attention(
            query.contiguous(), kv, inputs.plan, scale=options.get("scaling"), softcap=options.get("softcap")
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it, to [1, T, H, D]."""
    inputs: _Probe | _Paged | None = options.pop(_ARGUMENT, None)
    layer = getattr(module, "layer_idx", None)
    if inputs is None or not isinstance(layer, int):
        raise ModelError("its attention layers do not pass on what they are given, or have no number")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError("it has attention masks of its own")
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    return inputs.attend(layer, queries, keys, values, options)[None], None


def register() -> str:
    """Make our attention known to transformers; returns its name."""
    AttentionInterface.register(_NAME, _attention)
    return _NAME


def _check_complete(missing: Collection[str]) -> None:
    """Raise ``ModelError`` for tensors that the files lack: transformers draws them at random."""
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"tensor {min(missing)}{rest} missing from its files")


class TransformersDecoder(Decoder):
    """A whole model on one device. Weights are read by transformers; CUDA graphs and draft loops are not available."""

    def __init__(self, folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the folder; ``ModelError`` where its attention cannot be replaced by ours."""
        self.config = self.part = config
        self.dtype, self.device, self.batch_invariant = dtype, device, False
        self.communicator, self.shard = SINGLE_RANK, SINGLE_RANK.shard
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=register(), local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
            model, found = loaded
            _check_complete(found["missing_keys"])
            self._model = model.eval().to(device)
            specs = self._layer_specs()
        except Exception as error:  # transformers raises whatever its modules raise
            raise ModelError(f"{folder} cannot be run through transformers: {one_line(error)}") from error
        self.kv_cache_layout = KVCacheLayout.of(specs)
        self._groups = [group for group, _ in self.kv_cache_layout.places]

    def run(
        self, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Decoder.run``."""
        if len(self.kv_cache_layout.places) in layers:
            raise ModelError("through transformers the state after the last layer is there only normalised")
        attention = _Paged(kv_cache, [batch.groups[group] for group in self._groups])
        result = self._forward(batch.token_ids, batch.positions, batch.logit_indices, attention, bool(layers))
        states = [result.hidden_states[-1 if layer == LAST_HIDDEN_STATE else layer][0] for layer in layers]
        empty = torch.empty(len(batch.token_ids), 0, dtype=self.dtype, device=self.device)
        return result.logits[0], torch.cat([empty, *states], dim=-1)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_indices: torch.Tensor,
        attention: _Probe | _Paged,
        has_states: bool,
    ) -> Any:  # noqa: ANN401 - transformers' own output
        return self._model(
            input_ids=token_ids.long()[None], position_ids=positions.long()[None], use_cache=False,
            logits_to_keep=logit_indices.long(), output_hidden_states=has_states, **{_ARGUMENT: attention},
        )  # fmt: skip

    def _layer_specs(self) -> list[KVCacheSpec]:
        """Specs of all layers; ``ModelError`` unless each attends once, and within the window that it should."""
        own = self._model.config
        probe = _Probe(getattr(own, "sliding_window", None))
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        self._forward(token, token, token, probe, has_states=False)
        if sorted(probe.specs) != list(range(self.config.num_layers)):
            raise ModelError(f"{len(probe.specs)} of its {self.config.num_layers} layers have our attention")
        specs = [probe.specs[layer] for layer in range(self.config.num_layers)]
        types = getattr(own, "layer_types", None) or ["full_attention"] * len(specs)
        asks_for_window = [kind == "sliding_attention" for kind in types]
        is_unused = getattr(own, "use_sliding_window", True) is False
        if getattr(own, "layer_types", None) is None and probe.window is not None and not is_unused:
            asks_for_window = [True] * len(specs)
        if any(spec.window is None for spec, asks in zip(specs, asks_for_window, strict=True) if asks):
            raise ModelError("it does not say the windows of its sliding layers")
        return specs


def num_parameters(folder: Path) -> int:
    """Parameters of a model by its configuration alone; ``ModelError`` where transformers cannot make it."""
    config = transformers_config(read_object(folder / "config.json"))
    auto_class: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, attn_implementation=register(), trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its modules raise
        raise ModelError(f"{folder} cannot be run through transformers: {one_line(error)}") from error
    return sum(parameter.numel() for parameter in model.parameters())
