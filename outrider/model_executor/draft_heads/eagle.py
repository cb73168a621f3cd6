"""EAGLE (1 and 2): one decoder layer over the embedding of a token and the target's last hidden state before it.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024 (arXiv 2401.15077), and
github.com/SafeAILab/EAGLE, ``eagle/model/cnets1.py``: fc of embedding and state side by side is the layer's input,
which is not normalised; its output is the next state, from which the target's head gives logits.

Checkpoints: SafeAILab's (``fc.``, ``layers.0.``), and the Speculators format's of version 0.1 (``fusion_fc.``,
``transformer.``; github.com/vllm-project/speculators, ``src/speculators/models/eagle.py`` before its commit 792b9e6).

Shape letters: ``T`` tokens, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.config import check_architecture, read_layer
from outrider.model_executor.draft_heads.pair_head import PairHead, PairHeadConfig, PlainInput
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch, Weights
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.model_executor.models.config import LayerNorms
from outrider.model_executor.models.config_reader import read_model_config
from outrider.model_executor.models.json_files import read_object

_ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EagleModel", "EagleSpeculator")
_SPECULATORS_NAMES = (("fusion_fc.", "fc."), ("transformer.", "layers.0."))


def read_eagle_config(folder: Path, target_folder: Path) -> PairHeadConfig:
    """Configuration of an EAGLE head from its folder and its target's; ``ModelError`` for another head or target."""
    path = folder / "config.json"
    raw, target = read_object(path), read_model_config(target_folder)
    check_architecture(path, raw, _ARCHITECTURES, "EAGLE head")
    if raw.get("layernorms"):
        raise ModelError(f"{path}: layernorms is true; EAGLE heads without norms of their own are supported")
    nested = raw.get("transformer_layer_config")
    layer = read_layer(path, nested if isinstance(nested, dict) else raw, target)
    if layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"{path}: hidden_size is {layer.hidden_size}, and an EAGLE head for {target_folder} has the target's,"
            f" {target.hidden_size}"
        )
    layer = replace(
        layer, qkv_bias=layer.qkv_bias or bool(raw.get("qkv_bias")), quantization=None,
        variant=replace(layer.variant, norms=LayerNorms(before_attention=None)),
    )  # fmt: skip
    # Published configurations leave out whether there is a bias, or say otherwise than the tensors.
    names = read_tensors(folder)
    return PairHeadConfig(
        layer, has_fc_bias=any(name in names for name in ("fc.bias", "model.fc.bias", "fusion_fc.bias"))
    )


class EagleHead(PairHead):
    """An EAGLE head."""

    kind = "an EAGLE head"

    def __init__(self, config: PairHeadConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        size = config.layer.hidden_size
        self._fc = Linear(self._context, Features.all(2 * size), (Features.all(size, "fc"),), bias=config.has_fc_bias)

    def canonical(self, name: str) -> str | None:
        """SafeAILab's names without ``layers.0.``."""
        name = name.removeprefix("model.")
        for written, meant in _SPECULATORS_NAMES:
            if name.startswith(written):
                name = meant + name.removeprefix(written)
        return name.removeprefix("layers.0.")

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from super().weights()
        yield from self._fc.weights()

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H]; the next states, twice."""
        stream = self._fc(torch.cat([self._embedding.look_up(batch.token_ids), states], dim=-1))
        hidden, delta = self._run_layer(stream, batch, kv_cache)
        return PlainInput(hidden, delta, None, SINGLE_RANK).normed()
