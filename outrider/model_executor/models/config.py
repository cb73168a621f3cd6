"""Configuration of a model, as data: sizes, and what one architecture does otherwise than another.

The registry of families alone asks for a model's name. ``config_reader`` reads it from a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from outrider.model_executor.layers.quantization import Quantization


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a model."""

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    """The length the model was trained at, before stretching."""
    attention_factor: float | None = None
    """yarn: what cosines and sines are multiplied by; None: worked out from ``factor`` and the mscales."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: whether the correction range is rounded outwards to whole dimensions."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial: float = 1.0
    """Share of a head's features that are rotated, the first ones."""
    is_interleaved: bool = False
    """True if neighbouring features are rotated together, and not those half of the rotated ones apart."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies."""
    is_long: bool = False
    """longrope: ``long_factor`` is used, for short texts too: keys in the cache do not change as a text grows."""

    def for_length(self, length: int) -> RopeConfig:
        """Rope of sequences up to ``length`` tokens."""
        return replace(self, is_long=self.rope_type == "longrope" and length > self.original_max_position)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Norms of a decoder layer, by their names in the checkpoint; None: the layer has no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Normalizes what attention adds to the residual stream."""
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None

    @property
    def has_after(self) -> bool:
        """True if the outputs of blocks are normalized before they are added to the residual stream."""
        return self.after_attention is not None or self.after_feed_forward is not None


PRE_NORMS = LayerNorms()
"""Norms before each block alone, as Llama has them."""
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences of a family's computation from Llama's; the defaults are Llama's."""

    norms: LayerNorms = PRE_NORMS
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    activation: Activation = "silu"
    """Activation of the gate of the feed-forward layer."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Multiplies what a block adds to the residual stream."""
    attention_scale: float | None = None
    """Multiplies scores; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores x become cap * tanh(x / cap)."""
    has_sink_logits: bool = False
    """True if each head has a learned score of a key without a value, which takes part in the softmax."""
    has_output_gate: bool = False
    """True if a head's output is multiplied by the sigmoid of a gate, which comes with its query."""
    has_wide_qk_norm: bool = False
    """True if queries and keys are normalized over all heads together."""
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    """Logits x become cap * tanh(x / cap)."""
    has_value_norm: bool = False
    """True if values are normalised head by head, without weights."""
    has_layer_scale: bool = False
    """True if each layer multiplies the residual stream by a number of its own."""
    layer_input_size: int = 0
    """Features of each token that a layer gets beside the residual stream (per-layer embeddings); 0: none."""


LLAMA = Variant()
FALLBACK_SPEED = "four fifths, or a fifth without CUDA graphs,"
"""Speed of models that transformers' code computes, as a share of native speed."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A bound of what a model attends: the last tokens, and the first as attention sinks (Xiao et al., 2023)."""

    size: int
    num_sinks: int = 0


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts' tensors in a checkpoint."""

    block: str = "mlp"
    """Name of the block of the router and the experts; empty: the layer itself."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    """One tensor of gate and up, whose rows alternate; None: they are two."""
    router: str = "gate"
    shared: str = "shared_expert"
    score_bias: str = "e_score_correction_bias"
    """Name of the score bias of a router with sigmoid scores."""
    factors: str | None = None
    """Name of the router's factor of each expert's weight; None: there are none."""

    @property
    def prefix(self) -> str:
        """Prefix of the block's tensors below the layer."""
        return f"{self.block}." if self.block else ""


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Router whose scores are sigmoids, as DeepSeek-V3 has it: experts are chosen by score and a bias, in the groups
    with the best experts; weights are scores times ``scale``.
    """

    scale: float
    num_groups: int
    num_groups_chosen: int


@dataclass(frozen=True, slots=True)
class SwigluClamp:
    """Clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), gate at most ``limit``, up within it on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts of a model (mixture of experts, MoE)."""

    count: int
    """Number of experts of each layer."""
    num_chosen: int
    """Experts of each token."""
    intermediate_size: int
    """Inner features of each."""
    normalizes: bool
    """True if the weights of a token's experts are scaled to a sum of 1."""
    layers: tuple[bool, ...]
    """Layer by layer, whether it has experts; the others have an MLP."""
    names: ExpertNames = ExpertNames()
    has_bias: bool = False
    """True if the router and all projections have biases."""
    clamp: SwigluClamp | None = None
    """None: silu(gate) * up."""
    shared_size: int = 0
    """Inner features of an expert that every token meets; 0: there is none."""
    has_shared_gate: bool = True
    """True if a gate weighs the shared expert."""
    quantized_gates: frozenset[str] = frozenset()
    """Names of the router and of that gate where they have the weights' format, as of quantizers that do not ignore
    them.
    """
    sigmoid: SigmoidRouting | None = None
    """None: the router's scores are a softmax."""
    is_parallel: bool = False
    """Expert parallelism: of several ranks each holds some experts whole, not a share of every expert."""
    has_mlp: bool = False
    """True if layers with experts have an MLP too."""


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Recurrent layers (Gated DeltaNet) of a model that has them in place of attention in some layers."""

    num_heads: int
    """Number of heads of values, states and outputs."""
    num_key_heads: int
    """Number of heads of queries and keys, each of which serves neighbouring heads of values."""
    key_dim: int
    value_dim: int
    num_taps: int
    """Tokens that the causal convolution reads."""
    layers: tuple[bool, ...]
    """Layer by layer, whether it is recurrent."""
    is_interleaved: bool = False
    """True if the checkpoint has queries, keys, values and gates of one key head side by side."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer, of models whose layers differ."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    has_values: bool = True
    """False if values are the keys, before those are normalised and rotated."""


@dataclass(frozen=True, slots=True)
class MtpForm:
    """Layers for multi-token prediction (MTP) that a family's checkpoints may hold beside the model: names of their
    tensors, and the differences between families.
    """

    prefix: str
    """Prefix of the names of all of their tensors; with ``own_layer`` those of the first decoder layer."""
    projection: str
    """Product that joins embedding and state."""
    token_norm: str
    state_norm: str
    final_norm: str
    own_layer: str = ""
    """Prefix of the first decoder layer's names after ``prefix``."""
    has_state_first: bool = False
    """True if the product reads the state before the embedding."""
    hides_first_token: bool = False
    """True if the embedding of the pair at position 0 is zeros."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, whatever its architecture is called."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """The longest sequence the model is made for, rope scaling included."""
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if queries and keys are normalised head by head before they are rotated."""
    tied_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """Layer by layer, how many of the last tokens are seen; None: all."""
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    """The type the weights were saved in."""
    experts: ExpertsConfig | None = None
    """None: every layer has an MLP."""
    recurrent: RecurrentConfig | None = None
    """None: every layer has attention."""
    quantization: Quantization | None = None
    """Format of the weights of linear layers; None: ``dtype``."""
    attention_window: AttentionWindow | None = None
    """Attention window by the settings and not by the model; None: the model's own."""
    variant: Variant = LLAMA
    layer_ropes: tuple[RopeConfig, ...] = ()
    """Rotary embedding of each layer where they differ; empty: ``rope`` for all."""
    layer_sizes: tuple[LayerSizes, ...] = ()
    """Sizes of each layer where they differ."""
    kv_sources: tuple[int, ...] = ()
    """Layers whose keys and values each layer reads; empty: its own."""
    is_fallback: bool = False
    """True if transformers' code computes the model; fields of its layers are then of no use."""

    @property
    def default_length(self) -> int:
        """Tokens of the longest sequence unless another is asked for: of longrope, for which ``short_factor`` holds."""
        ropes = self.layer_ropes or (self.rope,)
        return min([self.max_position, *(one.original_max_position for one in ropes if one.rope_type == "longrope")])

    def for_length(self, length: int) -> ModelConfig:
        """Configuration for sequences up to ``length`` tokens."""
        ropes = tuple(rope.for_length(length) for rope in self.layer_ropes)
        return replace(self, rope=self.rope.for_length(length), layer_ropes=ropes)

    def rope_of(self, layer: int) -> RopeConfig:
        """Rotary embedding of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def of_layer(self, layer: int) -> ModelConfig:
        """Configuration with the sizes of one layer."""
        if not self.layer_sizes:
            return self
        own = self.layer_sizes[layer]
        return replace(
            self, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, intermediate_size=own.intermediate_size
        )

    def kv_source(self, layer: int) -> int:
        """Layer whose keys and values a layer reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def reach(self, layer: int) -> tuple[int | None, int]:
        """Tokens that a layer sees, the last ones (None: all), and how many of the first besides."""
        own, limit = self.sliding_windows[layer], self.attention_window
        return (own, 0) if limit is None or (own is not None and own <= limit.size) else (limit.size, limit.num_sinks)

    @property
    def sliding_window(self) -> int | None:
        """The smallest window of any layer; None: every layer sees everything."""
        return min((window for window in self.sliding_windows if window is not None), default=None)

    def is_recurrent(self, layer: int) -> bool:
        """True if a layer has a recurrent state in place of attention."""
        return self.recurrent is not None and self.recurrent.layers[layer]
