"""The decoder: embedding, attention and MLP layers, norm and head, over a paged cache.

Owns the parameters and the order of computation. What architectures do differently is read from ``ModelConfig``.
Refuses to know files, sequences and page tables: a forward gets tensors and attention plans, ready made.

Of several ranks that share a model each has a decoder of its part; what a block's last product gives is then a part of
a sum, and logits are of a part of the vocabulary, which ``Collectives`` puts together.

Queries, keys and values come from one product, gate and up from another. What a block gives is added to the residual
stream by the normalisation that comes next, so that both are one pass over it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.few_tokens import MAX_TOKENS, Matrix, NormedInput
from outrider.kernels.paged_attention import AttentionPlan, DevicePlan, paged_attention
from outrider.kernels.rope_and_cache import Angles, HeadLayout, turn_and_store
from outrider.model_executor.distributed.collectives import ALONE, Collectives
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.linear import Linear
from outrider.model_executor.models.norm import RmsNorm
from outrider.model_executor.models.rope import RotaryEmbedding
from outrider.model_executor.models.vocab import VocabRows


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A forward's inputs on the device, prepared once for all layers."""

    token_ids: torch.Tensor  # [T] int64, or int32 as the rest on a GPU
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    plans: dict[int | None, AttentionPlan | DevicePlan]
    """By sliding window."""
    logit_indices: torch.Tensor  # [N]


class Attention:
    """One layer's attention; ``config`` is that of the rank's part."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        self._is_alone = shard.size == 1
        self.window = config.sliding_windows[layer]
        query_size, num_turned = config.num_heads * config.head_dim, config.num_heads + config.num_kv_heads
        fused_size = query_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, fused_size, bias=config.qkv_bias, dtype=dtype, device=device)
        has_bias = config.output_bias and shard.rank == 0  # added once, by the first
        self.output = Linear(query_size, config.hidden_size, bias=has_bias, dtype=dtype, device=device)
        # One weight a head, the queries' then the keys', so that both are normalised in one go.
        self.qk_norm = torch.empty(num_turned, config.head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def __call__(self, x: torch.Tensor, kv: torch.Tensor, angles: Angles, batch: DeviceBatch) -> torch.Tensor:
        """``x`` [T, hidden] over one layer's ``kv`` [S, 2, H_kv, D]; stores the tokens' own keys and values first. To
        the same shape, the rank's part of a sum, or, alone, addends of it.
        """
        queries = turn_and_store(self.qkv.addends(x), kv, batch.slots, angles, self._heads, norm_weight=self.qk_norm)
        return self._attend(queries, kv, batch)

    @property
    def few_matrix(self) -> Matrix | None:
        """What ``of_few`` needs; None where that cannot be."""
        return self.qkv.matrix if self.qk_norm is None else None

    def of_few(
        self, source: NormedInput, matrix: Matrix, kv: torch.Tensor, angles: Angles, batch: DeviceBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a few tokens, from before addition and normalisation: their sum, and the result."""
        from outrider.kernels.few_tokens.kernel import turned  # Triton is slow to import

        total, queries = turned(source, matrix, kv, batch.slots, angles=angles, heads=self._heads)
        return total, self._attend(queries, kv, batch)

    def _attend(self, queries: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        attended = paged_attention(queries, kv, batch.plans[self.window])
        rows = attended.reshape(queries.shape[0], -1)
        return self.output.addends(rows) if self._is_alone else self.output(rows)


class Mlp:
    """One layer's gated MLP; ``config`` is that of the rank's part."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._is_alone = shard.size == 1
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype, device=device)
        has_bias = config.mlp_bias and shard.rank == 0
        self.down = Linear(inner, hidden, bias=has_bias, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] to the same shape, the rank's part of a sum, or, alone, to addends of it."""
        return self._to_hidden(self.gate_up.gated(x))

    @property
    def few_matrix(self) -> Matrix | None:
        """What ``of_few`` needs; None where that cannot be."""
        return self.gate_up.matrix

    def of_few(self, source: NormedInput, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of a few tokens, from before addition and normalisation: their sum, and the result."""
        from outrider.kernels.few_tokens.kernel import gated  # Triton is slow to import

        total, inner = gated(source, matrix)
        return total, self._to_hidden(inner)

    def _to_hidden(self, inner: torch.Tensor) -> torch.Tensor:
        return self.down.addends(inner) if self._is_alone else self.down(inner)


class DecoderLayer:
    """Attention and MLP, each normalised before and added after."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, ranks: Collectives
    ) -> None:
        self._ranks = ranks
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype, device, ranks.shard)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = Mlp(config, dtype, device, ranks.shard)

    def __call__(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, kv: torch.Tensor, angles: Angles, batch: DeviceBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``delta``, what the layer before gave, and the attention's to ``hidden`` [T, hidden], which is
        overwritten or left alone; returns the sum and what is to be added next.
        """
        qkv, gate_up = self.attention.few_matrix, self.mlp.few_matrix
        is_alone = self._ranks.shard.size == 1
        if is_alone and 0 < hidden.shape[0] <= MAX_TOKENS and qkv is not None and gate_up is not None:
            source = NormedInput(hidden, delta, self.attention_norm.weight, self.attention_norm.eps)
            hidden, delta = self.attention.of_few(source, qkv, kv, angles, batch)
            return self.mlp.of_few(NormedInput(hidden, delta, self.mlp_norm.weight, self.mlp_norm.eps), gate_up)
        add = self._ranks.add_and_norm
        x = self.attention_norm(hidden) if delta is None else add(hidden, delta, self.attention_norm)
        return hidden, self.mlp(add(hidden, self.attention(x, kv, angles, batch), self.mlp_norm))


class Decoder:
    """A whole model, or a rank's part of it, its parameters uninitialised until they are loaded."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Collectives = ALONE
    ) -> None:
        self.config = config
        """The whole model's."""
        self.shard = ranks.shard
        self.part = ranks.shard.part_of(config)
        """What is computed here."""
        self.dtype = dtype
        self.device = device
        self._ranks = ranks
        self._vocab = VocabRows(config, ranks.shard, dtype, device)
        self.layers = [DecoderLayer(self.part, layer, dtype, device, ranks) for layer in range(config.num_layers)]
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = Linear(
            config.hidden_size,
            ranks.shard.vocab_rows(config),
            bias=False,
            dtype=dtype,
            device=device,
            tied_to=self._vocab.rows if config.tied_embeddings else None,
        )
        self.head.weight[len(ranks.shard.vocab(config)) :].zero_()
        self._rotary = RotaryEmbedding(
            config.rope, head_dim=config.head_dim, max_position=config.max_position, device=device
        )

    @property
    def embedding(self) -> torch.Tensor:
        """[V, hidden], or the rank's rows of it."""
        return self._vocab.own

    def __call__(self, batch: DeviceBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Run the batch over ``kv_cache`` [L, S, 2, H_kv, D]; returns logits [N, V] of ``batch.logit_indices``."""
        return self.logits(self.hidden_states(batch, kv_cache), batch.logit_indices)

    def hidden_states(self, batch: DeviceBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """All layers and the last normalisation: [T, hidden]."""
        hidden = self._ranks.sum(self._vocab.look_up(batch.token_ids))  # [T, hidden]
        angles = self._rotary.angles(batch.positions, self.dtype)
        delta: torch.Tensor | None = None
        for layer, kv in zip(self.layers, kv_cache.unbind(0), strict=True):
            hidden, delta = layer(hidden, delta, kv, angles, batch)
        return self.norm(hidden) if delta is None else self._ranks.add_and_norm(hidden, delta, self.norm)

    def logits(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the chosen rows of ``hidden``, as computed: of the weights' type, in memory of their own."""
        if not indices.numel():
            return torch.empty(0, self.config.vocab_size, dtype=self.dtype, device=self.device)
        return self.head_logits(hidden, indices)

    def head_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """Logits [N, V] of the model's own type of the chosen rows of ``hidden``, of all where ``indices`` is None."""
        logits = self._ranks.join(self.head(hidden if indices is None else hidden.index_select(0, indices)))
        return logits[:, : self.config.vocab_size].contiguous()
