"""MTP: a layer for multi-token prediction that lies inside the target's own checkpoint, as MiMo-7B has it.

Source: Xiaomi, "MiMo: Unlocking the Reasoning Potential of Language Model", 2025 (arXiv 2505.07608), after DeepSeek-AI,
"DeepSeek-V3 Technical Report", 2024, section 2.2. Names and order are those of vLLM's
``vllm/model_executor/models/mimo_mtp.py``: embedding and state, each normalised, go through ``input_proj`` (the state
first) into a Qwen2 layer; its output, normalised by ``final_layernorm``, is the next state, from which the target's
head gives logits. The pair of position 0 has zeros for its embedding. As in vLLM the first layer drafts every token.

Shape letters: ``T`` tokens, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.pair_head import PairHead, PairHeadConfig
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights, whole
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.models.config_reader import read_model_config
from outrider.model_executor.models.families import family_of
from outrider.model_executor.models.json_files import read_object

_FIRST_LAYER = "model.mtp_layers.0."


def read_mtp_config(target_folder: Path) -> PairHeadConfig:
    """Configuration of a target's MTP layer from its folder; ``ModelError`` where it has none."""
    path, target = target_folder / "config.json", read_model_config(target_folder)
    count = read_object(path).get("num_nextn_predict_layers")
    if not family_of(target.architecture).has_mtp or type(count) is not int or count < 1:
        raise ModelError(
            f"{path}: a {target.architecture} with num_nextn_predict_layers {count!r} has no MTP layer; expected is a"
            " MiMoForCausalLM with num_nextn_predict_layers of at least 1"
        )
    return PairHeadConfig(replace(target, num_layers=1, sliding_windows=(None,), tied_embeddings=False))


class MtpHead(PairHead):
    """The first MTP layer of a MiMo checkpoint."""

    kind = "an MTP layer"

    def __init__(self, config: PairHeadConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype=dtype, device=device)
        size = config.layer.hidden_size
        self._token_norm, self._state_norm, self._attention_norm, self._final_norm = (
            self._make_norm() for _ in range(4)
        )
        self._input_proj = Linear(self._context, Features.all(2 * size), (Features.all(size, "input_proj"),))

    def canonical(self, name: str) -> str | None:
        """Names without ``model.mtp_layers.0.``; all else in the folder is the target's."""
        return name.removeprefix(_FIRST_LAYER) if name.startswith(_FIRST_LAYER) else None

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from super().weights()
        yield from self._input_proj.weights()
        for name, norm in (
            ("token_layernorm", self._token_norm),
            ("hidden_layernorm", self._state_norm),
            ("input_layernorm", self._attention_norm),
            ("final_layernorm", self._final_norm),
        ):
            yield f"{name}.weight", whole(norm.weight)

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H]; the next states, twice."""
        embeds = self._embedding.look_up(batch.token_ids) * (batch.positions != 0).unsqueeze(-1)
        stream = self._input_proj(torch.cat([self._state_norm(states), self._token_norm(embeds)], dim=-1))
        hidden, delta = self._run_layer(Residual(stream, None, self._attention_norm, SINGLE_RANK), batch, kv_cache)
        following = Residual(hidden, delta, self._final_norm, SINGLE_RANK).normed()[1]
        return following, following
