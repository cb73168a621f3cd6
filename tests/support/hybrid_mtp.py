"""MTP layers of Qwen3.5 and Qwen3-Next: random ones as published, and a reference over transformers' layer."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny_models import cached_tiny_model, load_reference

HIDDEN, EPS = 32, 1e-5
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def build_hybrid_mtp(folder: Path, architecture: str, *, seed: int = 1) -> Path:
    """Write a random hybrid target with an MTP layer, whose experts are stacked where it has any."""
    target = cached_tiny_model(architecture, seed=seed)
    shutil.copytree(target, folder)
    tensors = load_file(target / "model.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        for name, parameter in _attention_layer(load_reference(target))[1].named_parameters():
            scale = 0.4 if name.endswith("gate.weight") else 0.2
            tensors[f"mtp.layers.0.{name}"] = scale * torch.randn_like(parameter)
        tensors["mtp.fc.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
        tensors |= {f"mtp.{name}.weight": 0.2 * torch.randn(HIDDEN) for name in NORMS}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class HybridMtpReference:
    """vLLM's ``qwen3_next_mtp.py`` over transformers' decoder layer; drafts are computed from the whole text anew."""

    def __init__(self, folder: Path) -> None:
        self._target: Any = load_reference(folder)
        self._text, self._layer = _attention_layer(self._target)
        stored = load_file(folder / "model.safetensors")
        self._w = {name.removeprefix("mtp."): tensor for name, tensor in stored.items() if name.startswith("mtp.")}
        layer = {name.removeprefix("layers.0."): t for name, t in self._w.items() if name.startswith("layers.0.")}
        self._layer.load_state_dict(layer)
        self._layer.float().eval()

    def draft(self, text: list[int], count: int) -> list[int]:
        """``count`` tokens after the text, the likeliest each."""
        return self.draft_with_states(text, count)[0]

    @torch.no_grad()
    def draft_with_states(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """Tokens and the layer's state [count, H] that each was drawn from."""
        states = self._text(input_ids=torch.tensor([text])).last_hidden_state[0][:-1]  # [n - 1, H] normalised
        tokens, drafted = list(text[1:]), []
        for _ in range(count):
            following = self._run(self._text.embed_tokens(torch.tensor(tokens)), states)
            drafted.append(int(self._target.lm_head(following[-1])[:257].argmax()))
            tokens.append(drafted[-1])
            states = torch.cat([states, following[-1:]])
        return drafted, states[len(text) - 1 :]

    def _run(self, embeds: Tensor, states: Tensor) -> Tensor:  # [n, H] each
        embeds, states = self._norm(embeds, NORMS[0]), self._norm(states, NORMS[1])
        x = F.linear(torch.cat([embeds, states], -1), self._w["fc.weight"])[None]
        count = len(embeds)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        out = self._layer(
            x, position_embeddings=self._text.rotary_emb(x, positions), attention_mask=mask, position_ids=positions
        )
        return self._norm((out if isinstance(out, Tensor) else out[0])[0], NORMS[2])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), 1 + self._w[f"{name}.weight"], EPS)


def _attention_layer(target: Any) -> tuple[Any, Any]:
    """The text model of a target, and a layer like its first with attention."""
    text: Any = target.get_decoder()
    return text, copy.deepcopy(next(layer for layer in text.layers if hasattr(layer, "self_attn")))
