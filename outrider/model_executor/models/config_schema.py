"""Schema of ``config.json`` and ``generation_config.json``: types and ranges of every field that the engine reads.

The ranges are far beyond any model: they keep nonsense from being computed with. Whether sizes are those of the weights
is the checkpoint's to say. Fields that are not named here are not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from outrider.limits import STOP_TOKEN_IDS

MAX_POSITION = (1 << 31) - 1
Count = Annotated[int, Field(ge=1)]
HeadCount = Annotated[Count, Field(le=1 << 16)]
HeadDim = Annotated[Count, Field(le=1 << 14, multiple_of=2)]
ExpertCount = Annotated[int, Field(ge=1, le=4096)]
PositiveNumber = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
RopeTheta = Annotated[float, Field(gt=1, le=1e12, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=-MAX_POSITION, le=MAX_POSITION)]
"""Token id in a configuration; ids outside the vocabulary get an error of their own."""

_STRICT = ConfigDict(strict=True, extra="ignore")


class RopeParameters(BaseModel):
    """``rope_parameters``, or ``rope_scaling`` of older files."""

    model_config = _STRICT

    rope_type: str | None = None
    type: str | None = None
    rope_theta: RopeTheta | None = None
    factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=MAX_POSITION)] | None = None
    attention_factor: PositiveNumber | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    truncate: bool | None = None
    low_freq_factor: PositiveNumber | None = None
    high_freq_factor: PositiveNumber | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    short_factor: Annotated[list[PositiveNumber], Field(max_length=1 << 13)] | None = None
    long_factor: Annotated[list[PositiveNumber], Field(max_length=1 << 13)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _are_of_all_layers(cls, content: object) -> object:
        if isinstance(content, dict) and any(isinstance(value, dict) for value in content.values()):
            raise ValueError("should be those of all layers: parameters for each type of layer are not supported")
        return content

    @model_validator(mode="after")
    def _agree(self) -> Self:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor should be above low_freq_factor {low}, and is {high}")
        return self


class SpecialTokens(BaseModel):
    """Ids with a meaning; ``generation_config.json`` is read for these alone."""

    model_config = _STRICT

    eos_token_id: TokenId | list[TokenId] | None = None
    bos_token_id: TokenId | None = None
    pad_token_id: TokenId | None = None

    @field_validator("bos_token_id", "pad_token_id", mode="before")
    @classmethod
    def _is_first(cls, content: object) -> object:
        """Some generation_config.json have lists of them, of which nothing is used."""
        if cls is SpecialTokens and isinstance(content, list) and all(isinstance(entry, int) for entry in content):
            return next(iter(content), None)
        return content

    @model_validator(mode="after")
    def _are_not_too_many(self) -> Self:
        if isinstance(self.eos_token_id, list) and len(self.eos_token_id) > STOP_TOKEN_IDS.most:
            raise ValueError(f"eos_token_id has {len(self.eos_token_id)} ids; at most {STOP_TOKEN_IDS.most}")
        return self

    def without_rows(self, vocab_size: int) -> list[str]:
        """Ids that are not from 0 to ``vocab_size`` - 1, as ``field id``; a pad of -1 is none."""
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        pad = None if self.pad_token_id == -1 else self.pad_token_id
        ids = [*(("eos_token_id", end) for end in eos), ("bos_token_id", self.bos_token_id), ("pad_token_id", pad)]
        return [f"{name} {token}" for name, token in ids if token is not None and not 0 <= token < vocab_size]


class ConfigFile(SpecialTokens):
    """``config.json``; what is missing has the default of its architecture."""

    architectures: list[str] | str | None = None
    model_type: str | None = None
    vocab_size: Annotated[Count, Field(le=1 << 24)] | None = None
    hidden_size: Annotated[Count, Field(le=1 << 20)] | None = None
    intermediate_size: Annotated[Count, Field(le=1 << 24)] | None = None
    num_hidden_layers: Annotated[Count, Field(le=10_000)] | None = None
    num_attention_heads: HeadCount | None = None
    num_key_value_heads: HeadCount | None = None
    num_global_key_value_heads: HeadCount | None = None
    head_dim: HeadDim | None = None
    global_head_dim: HeadDim | None = None
    num_kv_shared_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    hidden_size_per_layer_input: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    vocab_size_per_layer_input: Annotated[Count, Field(le=1 << 24)] | None = None
    max_position_embeddings: Annotated[Count, Field(le=MAX_POSITION)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=1e-20, lt=1, allow_inf_nan=False)] | None = None
    rope_theta: RopeTheta | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=MAX_POSITION)] | None = None
    """Value as in ``rope_scaling``, over which it has priority."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: PositiveNumber | None = None
    attn_logit_softcapping: PositiveNumber | None = None
    final_logit_softcapping: PositiveNumber | None = None
    embedding_multiplier: PositiveNumber | None = None
    residual_multiplier: PositiveNumber | None = None
    attention_multiplier: PositiveNumber | None = None
    logits_scaling: PositiveNumber | None = None
    swiglu_alpha: PositiveNumber | None = None
    swiglu_limit: PositiveNumber | None = None
    rope_local_base_freq: RopeTheta | None = None
    use_bidirectional_attention: bool | str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    sliding_window: Annotated[Count, Field(le=MAX_POSITION)] | None = None
    sliding_window_pattern: Annotated[Count, Field(le=10_000)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    layer_types: Annotated[list[str], Field(max_length=10_000)] | None = None
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    num_experts_per_tok: ExpertCount | None = None
    enable_moe_block: bool | None = None
    top_k_experts: ExpertCount | None = None
    moe_intermediate_size: Annotated[Count, Field(le=1 << 24)] | None = None
    shared_expert_intermediate_size: Annotated[Count, Field(le=1 << 24)] | None = None
    norm_topk_prob: bool | None = None
    n_routed_experts: ExpertCount | None = None
    n_shared_experts: ExpertCount | None = None
    n_group: ExpertCount | None = None
    topk_group: ExpertCount | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0, le=10_000)] | None = None
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    use_qk_norm: bool | None = None
    decoder_sparse_step: Annotated[Count, Field(le=10_000)] | None = None
    mlp_only_layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=10_000)] | None = None
    linear_num_value_heads: Annotated[Count, Field(le=1 << 12)] | None = None
    linear_num_key_heads: Annotated[Count, Field(le=1 << 12)] | None = None
    linear_key_head_dim: Annotated[Count, Field(le=1 << 10)] | None = None
    linear_value_head_dim: Annotated[Count, Field(le=1 << 10)] | None = None
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=8)] | None = None
    full_attention_interval: Annotated[Count, Field(le=10_000)] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        heads, hidden = self.num_attention_heads, self.hidden_size
        for name in ("num_key_value_heads", "num_global_key_value_heads"):
            kv_heads: int | None = getattr(self, name)
            if heads and kv_heads and heads % kv_heads:
                raise ValueError(f"{name} should divide num_attention_heads {heads}, and {kv_heads} does not")
        if heads and hidden and self.head_dim is None and hidden % (2 * heads):
            raise ValueError(
                f"hidden_size should be a multiple of 2 x num_attention_heads {heads}, and {hidden} is not"
            )
        if self.layer_types is not None and self.num_hidden_layers not in (None, len(self.layer_types)):
            raise ValueError(
                f"layer_types should name num_hidden_layers {self.num_hidden_layers}, and has {len(self.layer_types)}"
            )
        experts = self.num_experts or self.num_local_experts or self.n_routed_experts
        for name in ("num_experts_per_tok", "top_k_experts"):
            chosen: int | None = getattr(self, name)
            if experts and chosen and chosen > experts:
                raise ValueError(f"{name} should be at most num_experts {experts}, and is {chosen}")
        return self


ROPE_PARAMETERS: TypeAdapter[RopeParameters] = TypeAdapter(RopeParameters)
CONFIG_FILE: TypeAdapter[ConfigFile] = TypeAdapter(ConfigFile)
GENERATION_CONFIG_FILE: TypeAdapter[SpecialTokens] = TypeAdapter(SpecialTokens)


_LOOKED_UP = ("architectures", "auto_map", "dtype", "torch_dtype")


def without_code(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json without what transformers looks up by name: classes, and types that torch may not have."""
    return {key: value for key, value in fields.items() if key not in _LOOKED_UP}
