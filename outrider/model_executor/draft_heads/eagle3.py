"""EAGLE-3: one decoder layer over the states of three of the target's layers, and a head over a reduced vocabulary.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.
Position i of the head stands for the pair (token i + 1, state of position i): it gives the distribution of token i + 2.
Its state after the layer, before the last norm, takes the place of the target's where that is not known yet.

Heads of the Speculators format may have more norms, by their configuration: of the target's states before ``fc``, all
together (``input_norm``) or layer by layer (``fc_norm``), and of the head's own state (``norm_output``).

Shape letters: ``T`` tokens, ``N`` rows, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm

from outrider.kernels.gemv import NormedInput
from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.config import DraftHeadConfig
from outrider.model_executor.draft_heads.draft_vocabulary import DraftVocabulary
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights, whole
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import UnquantizedLinear
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class JoinedInput(Residual):
    """Input of the layer's attention: the normalised embedding beside the normalised state; the state is the stream."""

    embeds: torch.Tensor  # [T, H] normalised

    def normed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state [T, H], and both [T, 2 H]."""
        state, normed = Residual.normed(self)
        return state, torch.cat([self.embeds, normed], dim=-1)

    def unnormed(self) -> NormedInput | None:
        """No kernel joins two inputs."""
        return None


class Eagle3Head:
    """The head, its parameters uninitialised until they are loaded. The embedding is the target's."""

    kind = "an EAGLE-3 head"

    def __init__(self, config: DraftHeadConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        layer = config.layer
        context = LayerContext(layer, layer, dtype, device, SINGLE_RANK, UnquantizedLinear)
        hidden = Features.all(layer.hidden_size)
        fused = Features.all(len(config.hidden_state_layers) * config.target_hidden_size)
        self._embedding = VocabRows(context)
        self._input_norm = torch.empty(fused.size if config.norm_before_fc else 0, dtype=dtype, device=device)  # [F]
        num_normed = len(config.hidden_state_layers) if config.fc_norm else 0
        self._fc_norms = torch.empty(num_normed, config.target_hidden_size, dtype=dtype, device=device)  # [L, H']
        self._fc = Linear(context, fused, (Features.all(layer.hidden_size, "fc"),))
        self._embed_norm, self._state_norm, self._feed_forward_norm, self._norm = (
            RmsNorm(layer.hidden_size, layer.rms_norm_eps, dtype=dtype, device=device) for _ in range(4)
        )
        self._attention = Attention(context, 0, input_size=2 * layer.hidden_size)
        self._feed_forward = GatedMlp(context, 0)
        self._head = Linear(context, hidden, (Features.all(config.draft_vocab_size, "lm_head"),))
        self._vocabulary = DraftVocabulary(config.draft_vocab_size, layer.vocab_size, dtype=dtype, device=device)
        self._rotary = RotaryEmbedding(
            layer.rope, head_dim=layer.head_dim, max_position=layer.max_position, device=device
        )
        self.kv_cache_layout = KVCacheLayout.of([self._attention.kv_cache_spec])

    def canonical(self, name: str) -> str | None:
        """The Speculators format's name."""
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        return name if self._vocabulary.has_use_for(name) else None

    @property
    def borrowed(self) -> tuple[str, ...]:
        """The embedding; of a head over the whole vocabulary, its last product too."""
        embedding = ("embed_tokens.weight",)
        return embedding if self._vocabulary.is_reduced else (*embedding, "lm_head.weight")

    def weights(self) -> Weights:
        """The tensors of a checkpoint, as the Speculators format names them, ``embed_tokens.weight`` included."""
        yield from self._embedding.weights()
        yield from self._fc.weights()
        if self.config.norm_before_fc:
            yield "input_norm.weight", whole(self._input_norm)
        yield from ((f"fc_norm.{place}.weight", whole(weight)) for place, weight in enumerate(self._fc_norms))
        yield "norm.weight", whole(self._norm.weight)
        yield from self._head.weights()
        for name, norm in (
            ("input_layernorm", self._embed_norm),
            ("hidden_norm", self._state_norm),
            ("post_attention_layernorm", self._feed_forward_norm),
        ):
            yield f"layers.0.{name}.weight", whole(norm.weight)
        for prefix, weights in (("self_attn.", self._attention.weights()), ("", self._feed_forward.weights())):
            yield from ((f"layers.0.{prefix}{name}", target) for name, target in weights)
        yield from self._vocabulary.weights()

    def finish_loading(self) -> None:
        """All tensors are there; ``ModelError`` for a ``d2t`` of another target."""
        self._vocabulary.finish_loading()
        self._head.prepare()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, F] to what the layer reads [T, H]."""
        eps = self.config.layer.rms_norm_eps
        if self.config.norm_before_fc:
            states = rms_norm(states, self._input_norm.shape, self._input_norm, eps)
        if self.config.fc_norm:
            parts = states.view(-1, *self._fc_norms.shape)  # [T, L, H']
            states = (rms_norm(parts, parts.shape[-1:], None, eps) * self._fc_norms).view(states.shape)
        return self._fc(states)

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H], which may be overwritten; the next states, and what ``logits``
        takes, [T, H] each.
        """
        embeds = self._embed_norm(self._embedding.look_up(batch.token_ids))
        if self.config.norm_before_residual:
            states = self._state_norm(states)
            source: Residual = JoinedInput(states, None, _SAME, SINGLE_RANK, embeds)
        else:
            source = JoinedInput(states, None, self._state_norm, SINGLE_RANK, embeds)
        cos_sin = self._rotary.cos_sin(batch.positions, self.dtype)
        hidden, delta = self._attention(source, kv_cache.layer(0), cos_sin, batch.groups[0])
        hidden, delta = self._feed_forward(Residual(hidden, delta, self._feed_forward_norm, SINGLE_RANK))
        following, normed = Residual(hidden, delta, self._norm, SINGLE_RANK).normed()
        return (normed if self.config.norm_output else following), normed

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows, V] logits of nothing, for ``logits`` to write to; None where it needs no such memory."""
        return self._vocabulary.empty_logits(num_rows)

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] to logits [N, V] of the target's ids; ``out`` [N, V] is part of what ``empty_logits`` gave."""
        return self._vocabulary.logits(self._head(normed), out)


class _Same:
    """A norm of what was normalised before."""

    weight = torch.empty(0)
    eps = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return x.add_(delta)


_SAME = _Same()
