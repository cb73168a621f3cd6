"""MTP: a layer for multi-token prediction that lies inside the target's own checkpoint, as MiMo-7B, Qwen3.5 and
Qwen3-Next have it.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; Xiaomi, "MiMo: Unlocking the Reasoning Potential
of Language Model", 2025 (arXiv 2505.07608). Names and order are those of vLLM's
``vllm/model_executor/models/mimo_mtp.py`` and ``qwen3_next_mtp.py``: embedding and the target's normalised state, each
normalised, go through a product into a decoder layer of the target's, with attention also where the target has
recurrent layers, and with experts where it has any; its output, normalised, is the next state, from which the target's
head gives logits. ``MtpForm`` has what families do differently. As in vLLM the first layer drafts every token.

Shape letters: ``T`` tokens, ``H`` hidden size.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.pair_head import PairHead, PairHeadConfig
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.model_executor.loader.stacked_experts import with_stored_experts
from outrider.model_executor.models.config import ModelConfig, MtpForm
from outrider.model_executor.models.config_reader import read_model_config
from outrider.model_executor.models.families import FAMILIES, family_of

_LAYER = re.compile(r"(layers\.)?\d+\.")


def read_mtp_config(target_folder: Path) -> PairHeadConfig:
    """Configuration of a target's MTP layer from its folder; ``ModelError`` where it has none."""
    target = read_model_config(target_folder)
    known = FAMILIES.get(target.architecture)
    form = None if known is None else known.mtp
    stored = {} if form is None else read_tensors(target_folder)
    own = {name: tensor for name, tensor in stored.items() if form is not None and name.startswith(form.prefix)}
    if form is None or not own:
        where = "" if form is None else f" without tensors {form.prefix}*"
        raise ModelError(
            f"{target_folder}: a {target.architecture}{where} has no MTP layer; such layers are in checkpoints of MiMo,"
            " Qwen3.5 and Qwen3-Next"
        )
    return PairHeadConfig(with_stored_experts(_layer_of(target, form), own))


def _layer_of(target: ModelConfig, form: MtpForm) -> ModelConfig:
    """Decoder layer of a target's MTP layer: one with attention, and with experts if the target has any."""
    experts, quantization = target.experts, target.quantization
    return replace(
        target,
        num_layers=1,
        sliding_windows=(None,),
        tied_embeddings=False,
        recurrent=None,
        experts=experts and replace(experts, layers=(True,)),
        quantization=quantization
        and replace(quantization, aliases=((r"^model\.layers\.0\.", form.prefix + form.own_layer),)),
    )


class MtpHead(PairHead):
    """The first MTP layer of a checkpoint."""

    kind = "an MTP layer"

    def __init__(self, config: PairHeadConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        layer = config.layer
        if (form := family_of(layer.architecture).mtp) is None:
            raise ModelError(f"{layer.architecture} has no MTP layers")
        self._form = form
        self._token_norm, self._state_norm, self._final_norm = (self._make_norm() for _ in range(3))
        self._projection = Linear(
            self._context, Features.all(2 * layer.hidden_size), (Features.all(layer.hidden_size, form.projection),),
            module=form.prefix,
        )  # fmt: skip

    def canonical(self, name: str) -> str | None:
        """Names without the prefixes; all else in the folder is the target's."""
        prefix, own = self._form.prefix, self._form.own_layer
        if not name.startswith(prefix):
            return None
        rest = name.removeprefix(prefix)
        return None if _LAYER.match(rest) and not rest.startswith(own) else rest.removeprefix(own)

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from super().weights()
        yield from self._projection.weights()
        form = self._form
        for name, norm in (
            (form.token_norm, self._token_norm),
            (form.state_norm, self._state_norm),
            (form.final_norm, self._final_norm),
        ):
            yield f"{name}.weight", norm.target()

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H]; the next states, twice."""
        embeds = self._embedding.look_up(batch.token_ids)
        if self._form.hides_first_token:
            embeds = embeds * (batch.positions != 0).unsqueeze(-1)
        sides = self._token_norm(embeds), self._state_norm(states)
        stream = self._projection(torch.cat(sides[::-1] if self._form.has_state_first else sides, dim=-1))
        hidden, delta = self._run_layer(stream, batch, kv_cache)
        following = Residual(hidden, delta, self._final_norm, SINGLE_RANK).normed()[1]
        return following, following
