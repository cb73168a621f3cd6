"""Registry of model families: what differs between the architectures that can be served.

A family reads what only it has out of ``config.json`` and chooses the layers' feed-forward block; all else is in
``ModelConfig`` and common to all. A new family is a new entry in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import ModelError, NoNativeLayerError
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import FeedForward
from outrider.model_executor.layers.experts import sparse_mlp
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.layers.mlp_with_experts import gemma4_mlp
from outrider.model_executor.models.config import (
    LLAMA,
    ExpertNames,
    ExpertsConfig,
    LayerNorms,
    LayerSizes,
    MtpForm,
    RecurrentConfig,
    SigmoidRouting,
    SwigluClamp,
    Variant,
)

Fields = Mapping[str, Any]
"""``config.json``, with the defaults of its architecture."""


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """Properties of one model that its family reads."""

    qkv_bias: bool
    output_bias: bool
    sliding_windows: tuple[int | None, ...]
    """Layer by layer, how many of the last tokens are seen; None: all."""
    qk_norm: bool = False
    """True if queries and keys are normalised head by head before they are turned."""
    variant: Variant = LLAMA
    activation: str = "hidden_act"
    """Field that names the feed-forward layers' activation."""
    rope_types: tuple[str, ...] = ()
    """Layer by layer, the key of its parameters in ``rope_parameters``; empty: all layers have the same ones."""
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()
    """Sizes of each layer where they differ."""
    kv_sources: tuple[int, ...] = ()
    """Layers whose keys and values each layer reads; empty: its own."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that are computed alike."""

    architecture: str
    """Name in ``architectures`` of config.json."""
    model_type: str
    """Name in ``model_type``."""
    traits: Callable[[Fields], FamilyTraits]
    feed_forward: Callable[[LayerContext, int], FeedForward] = GatedMlp
    """The second block of a layer, by its number."""
    reads_as: str | None = None
    """The ``model_type`` by whose defaults transformers completes config.json, where it does not know the family."""
    mtp: MtpForm | None = None
    """Layers for multi-token prediction that checkpoints may hold, which the model itself does not run."""
    has_partial_rotary: bool = False
    """True if a share of each head's features may be rotated alone."""
    rotates_pairs: bool = False
    """True if neighbouring features are rotated together."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Projections that checkpoints keep as one, and their parts from the first row on."""
    has_layer_ropes: bool = False
    """True if ``rope_parameters`` has parameters for each type of layer."""
    is_text_part: bool = False
    """True if checkpoints hold a model that takes images or sound too, of which the text part is served."""
    text_types: tuple[str, ...] = ()
    """``model_type`` of such a text part."""


def _llama(fields: Fields) -> FamilyTraits:
    bias = _attention_bias(fields)
    return FamilyTraits(qkv_bias=bias, output_bias=bias, sliding_windows=_same_window(fields, None))


def _mistral(fields: Fields) -> FamilyTraits:
    bias = _attention_bias(fields)
    # transformers computes a Mistral that names its layers' types as a Ministral.
    has_types = fields.get("layer_types") is not None
    windows = _windows_by_layer(fields) if has_types else _same_window(fields, fields.get("sliding_window"))
    return FamilyTraits(qkv_bias=bias, output_bias=bias, sliding_windows=windows)


def _qwen2(fields: Fields) -> FamilyTraits:
    return FamilyTraits(qkv_bias=True, output_bias=False, sliding_windows=_windows_by_layer(fields))


def _qwen3(fields: Fields) -> FamilyTraits:
    bias = _attention_bias(fields)
    return FamilyTraits(qkv_bias=bias, output_bias=bias, sliding_windows=_windows_by_layer(fields), qk_norm=True)


_SANDWICH = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
"""Norms before and after both blocks, as Gemma names them."""
_GEMMA_ACTIVATION = "hidden_activation"


def _gemma3(fields: Fields) -> FamilyTraits:
    if fields.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: tokens would see those after them")
    bias = _attention_bias(fields)
    return FamilyTraits(
        qkv_bias=bias, output_bias=bias, sliding_windows=_windows_by_layer(fields), qk_norm=True,
        variant=_gemma_variant(fields), activation=_GEMMA_ACTIVATION, rope_types=tuple(fields["layer_types"]),
    )  # fmt: skip


def _gemma3_part(fields: Fields) -> FamilyTraits:
    """Text part of a Gemma 3 with images, whose logits transformers does not cap."""
    traits = _gemma3(fields)
    return replace(traits, variant=replace(traits.variant, logits_softcap=None))


def _qwen3_moe(fields: Fields) -> FamilyTraits:
    bias = _attention_bias(fields)
    return FamilyTraits(
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=_same_window(fields, fields.get("sliding_window")),
        qk_norm=True,
        experts=_qwen_experts(fields, normalizes=fields["norm_topk_prob"]),
    )


def _qwen3_vl_moe(fields: Fields) -> FamilyTraits:
    """Qwen3-VL's layers have no window and always normalise, whatever config.json says."""
    return _qwen3_moe({**fields, "norm_topk_prob": True, "sliding_window": None})


def _qwen_experts(fields: Fields, *, normalizes: bool) -> ExpertsConfig:
    """Experts in every ``decoder_sparse_step``-th layer, but for those of ``mlp_only_layers``."""
    num_layers, step = int(fields["num_hidden_layers"]), int(fields.get("decoder_sparse_step", 1))
    plain = set(fields.get("mlp_only_layers") or ())
    layers = tuple((layer + 1) % step == 0 and layer not in plain for layer in range(num_layers))
    return _experts(fields, layers, fields["moe_intermediate_size"], normalizes=normalizes)


_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def _mixtral(fields: Fields) -> FamilyTraits:
    layers = (True,) * int(fields["num_hidden_layers"])
    experts = _experts(fields, layers, fields["intermediate_size"], normalizes=True)
    return replace(_mistral(fields), experts=replace(experts, names=_MIXTRAL_NAMES))


def _olmoe(fields: Fields) -> FamilyTraits:
    if fields.get("clip_qkv") is not None:
        raise NoNativeLayerError(
            "clip_qkv is not supported but through transformers: it clamps queries, keys and values"
        )
    layers = (True,) * int(fields["num_hidden_layers"])
    experts = _experts(fields, layers, fields["intermediate_size"], normalizes=fields["norm_topk_prob"])
    return replace(_llama(fields), variant=Variant(has_wide_qk_norm=True), experts=experts)


_GPT_OSS_ALPHA = 1.702
_GPT_OSS_NAMES = ExpertNames(gate_up="gate_up_proj", router="router")


def _gpt_oss(fields: Fields) -> FamilyTraits:
    bias, layers = _attention_bias(fields), (True,) * int(fields["num_hidden_layers"])
    experts = _experts(fields, layers, fields["intermediate_size"], normalizes=True)
    # Older versions of transformers have no field for it, nor do published configurations.
    clamp = SwigluClamp(fields.get("swiglu_alpha") or _GPT_OSS_ALPHA, fields["swiglu_limit"])
    return FamilyTraits(
        qkv_bias=bias, output_bias=bias, sliding_windows=_windows_by_layer(fields),
        variant=Variant(has_sink_logits=True),
        experts=replace(experts, names=_GPT_OSS_NAMES, has_bias=True, clamp=clamp),
    )  # fmt: skip


def _experts(fields: Fields, layers: tuple[bool, ...], size: int, *, normalizes: bool) -> ExpertsConfig:
    count = fields.get("num_local_experts") or fields["num_experts"]
    return ExpertsConfig(count, fields["num_experts_per_tok"], size, normalizes, layers)


def _gemma2(fields: Fields) -> FamilyTraits:
    bias = _attention_bias(fields)
    variant = replace(_gemma_variant(fields), attention_softcap=fields.get("attn_logit_softcapping"))
    return FamilyTraits(
        qkv_bias=bias, output_bias=bias, sliding_windows=_windows_by_layer(fields), variant=variant,
        activation=_GEMMA_ACTIVATION,
    )  # fmt: skip


def _gemma_variant(fields: Fields) -> Variant:
    return Variant(
        norms=_SANDWICH,
        norm_offset=1.0,
        embedding_multiplier=fields["hidden_size"] ** 0.5,
        attention_scale=fields["query_pre_attn_scalar"] ** -0.5,
        logits_softcap=fields.get("final_logit_softcapping"),
    )


def _gemma4(fields: Fields) -> FamilyTraits:
    if fields.get("use_bidirectional_attention") == "all":
        raise ModelError("use_bidirectional_attention all is not supported: tokens would see those after them")
    inputs = fields.get("hidden_size_per_layer_input") or 0
    if inputs and fields["vocab_size_per_layer_input"] != fields["vocab_size"]:
        raise NoNativeLayerError(
            "a vocab_size_per_layer_input other than vocab_size is not supported but through transformers"
        )
    bias, types = _attention_bias(fields), tuple(fields["layer_types"])
    experts = _gemma4_experts(fields)
    variant = Variant(
        norms=_SANDWICH if experts is None else _GEMMA4_NORMS,
        embedding_multiplier=fields["hidden_size"] ** 0.5, attention_scale=1.0,
        logits_softcap=fields.get("final_logit_softcapping"), has_value_norm=True, has_layer_scale=True,
        layer_input_size=inputs,
    )  # fmt: skip
    return FamilyTraits(
        qkv_bias=bias, output_bias=bias, sliding_windows=_windows_by_layer(fields), qk_norm=True, variant=variant,
        activation=_GEMMA_ACTIVATION, rope_types=types, layer_sizes=_gemma4_sizes(fields),
        kv_sources=_shared_kv_sources(fields), experts=experts,
    )  # fmt: skip


_GEMMA4_NORMS = replace(_SANDWICH, after_feed_forward=None)
"""Norms of layers with experts, whose block normalises its sum itself."""
_GEMMA4_NAMES = ExpertNames(block="", router="router.proj", factors="router.per_expert_scale")


def _gemma4_experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.get("enable_moe_block"):
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if fields.get(name) is None:
            raise ModelError(f"enable_moe_block without {name}")
    return ExpertsConfig(
        fields["num_experts"], fields["top_k_experts"], fields["moe_intermediate_size"], normalizes=True,
        layers=(True,) * int(fields["num_hidden_layers"]), has_mlp=True, names=_GEMMA4_NAMES,
    )  # fmt: skip


def _gemma4_sizes(fields: Fields) -> tuple[LayerSizes, ...]:
    types, own = fields["layer_types"], {int(layer): one for layer, one in fields.get("per_layer_config", {}).items()}
    if not own:  # of older versions of transformers
        heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
        full = {"head_dim": fields.get("global_head_dim"), "num_key_value_heads": heads}
        own = {layer: full for layer, layer_type in enumerate(types) if layer_type == "full_attention"}
    for layer, one in own.items():
        kv_heads, head_dim = one.get("num_key_value_heads") or 1, one.get("head_dim") or 2
        if not 0 < kv_heads <= fields["num_attention_heads"] or fields["num_attention_heads"] % kv_heads:
            raise ModelError(f"num_key_value_heads {kv_heads} of layer {layer} should divide num_attention_heads")
        if head_dim < 1 or head_dim % 2:
            raise ModelError(f"head_dim {head_dim} of layer {layer} should be positive and even")
    first_shared = len(types) - (fields.get("num_kv_shared_layers") or 0)
    return tuple(
        LayerSizes(
            own.get(layer, {}).get("num_key_value_heads") or fields["num_key_value_heads"],
            own.get(layer, {}).get("head_dim") or fields["head_dim"],
            fields["intermediate_size"] * (2 if fields.get("use_double_wide_mlp") and layer >= first_shared else 1),
            has_values=not (fields.get("attention_k_eq_v") and layer_type == "full_attention"),
        )
        for layer, layer_type in enumerate(types)
    )


def _shared_kv_sources(fields: Fields) -> tuple[int, ...]:
    """Sources of all layers: of the last ones, the last layer of their type that has keys."""
    types = list(fields["layer_types"])
    owners = types[: len(types) - (fields.get("num_kv_shared_layers") or 0)]
    if missing := set(types) - set(owners):
        raise ModelError(f"num_kv_shared_layers leaves no layer of type {', '.join(sorted(missing))} that has keys")
    last = {kind: layer for layer, kind in enumerate(owners)}
    return tuple(layer if layer < len(owners) else last[kind] for layer, kind in enumerate(types))


def _glm(fields: Fields) -> FamilyTraits:
    return FamilyTraits(qkv_bias=_attention_bias(fields), output_bias=False, sliding_windows=_same_window(fields, None))


def _glm4(fields: Fields) -> FamilyTraits:
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(_glm(fields), variant=Variant(norms=norms))


_GLM4_MOE_NAMES = ExpertNames(shared="shared_experts")


def _glm4_moe(fields: Fields) -> FamilyTraits:
    num_layers, count = int(fields["num_hidden_layers"]), int(fields["n_routed_experts"])
    form = SigmoidRouting(fields["routed_scaling_factor"], fields["n_group"], fields["topk_group"])
    _check_groups(form, count, fields["num_experts_per_tok"])
    experts = ExpertsConfig(
        count, fields["num_experts_per_tok"], fields["moe_intermediate_size"], bool(fields["norm_topk_prob"]),
        tuple(layer >= fields["first_k_dense_replace"] for layer in range(num_layers)), _GLM4_MOE_NAMES,
        shared_size=fields["moe_intermediate_size"] * fields["n_shared_experts"], has_shared_gate=False, sigmoid=form,
    )  # fmt: skip
    return replace(_glm(fields), qk_norm=bool(fields["use_qk_norm"]), experts=experts)


def _check_groups(form: SigmoidRouting, count: int, num_chosen: int) -> None:
    """Raise ``ModelError`` unless experts are in groups of two at least, and those that are chosen have enough."""
    groups, size = form.num_groups, count // max(1, form.num_groups)
    if groups < 1 or count % groups or (groups > 1 and size < len(("best", "second"))):
        raise ModelError(f"n_group should divide the {count} experts into groups of two or more, and is {groups}")
    if not 1 <= form.num_groups_chosen <= groups or form.num_groups_chosen * size < num_chosen:
        raise ModelError(
            f"topk_group should be from 1 to n_group {groups}, with {num_chosen} experts at least, and is"
            f" {form.num_groups_chosen}"
        )


def _granite(fields: Fields) -> FamilyTraits:
    variant = Variant(
        embedding_multiplier=fields["embedding_multiplier"],
        residual_multiplier=fields["residual_multiplier"],
        attention_scale=fields["attention_multiplier"],
        logits_divisor=fields["logits_scaling"],
    )
    return replace(_llama(fields), variant=variant)


def _olmo2(fields: Fields) -> FamilyTraits:
    norms = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return replace(_llama(fields), variant=Variant(norms=norms, has_wide_qk_norm=True))


def _olmo3(fields: Fields) -> FamilyTraits:
    windows, types = _windows_by_layer(fields), tuple(fields["layer_types"])
    return replace(_olmo2(fields), sliding_windows=windows, rope_types=types)


def _phi3(fields: Fields) -> FamilyTraits:
    windows = _same_window(fields, fields.get("sliding_window"))
    return FamilyTraits(qkv_bias=False, output_bias=False, sliding_windows=windows)


def _qwen3_next(fields: Fields) -> FamilyTraits:
    traits = _qwen3_5(fields)
    recurrent = None if traits.recurrent is None else replace(traits.recurrent, is_interleaved=True)
    return replace(traits, recurrent=recurrent, experts=_gated_experts(fields, normalizes=fields["norm_topk_prob"]))


def _qwen3_5_moe(fields: Fields) -> FamilyTraits:
    return replace(_qwen3_5(fields), experts=_gated_experts(fields, normalizes=True))


def _qwen3_5(fields: Fields) -> FamilyTraits:
    bias, types = _attention_bias(fields), fields["layer_types"]
    for layer_type in types:
        if layer_type not in ("linear_attention", "full_attention"):
            raise ModelError(
                f"layer type {layer_type!r} is not supported; supported are linear_attention, full_attention"
            )
    if "full_attention" not in types:
        raise ModelError("layer_types without full_attention are not supported: the KV cache would have no pages")
    num_heads, num_key_heads = fields["linear_num_value_heads"], fields["linear_num_key_heads"]
    if num_heads % num_key_heads:
        raise ModelError(
            f"linear_num_key_heads should divide linear_num_value_heads {num_heads}, and {num_key_heads} does not"
        )
    if "linear_attention" in types and fields["hidden_act"] not in ("silu", "swish"):
        raise ModelError(f"hidden_act {fields['hidden_act']!r} is not supported with linear_attention, silu is")
    recurrent = RecurrentConfig(
        num_heads,
        num_key_heads,
        fields["linear_key_head_dim"],
        fields["linear_value_head_dim"],
        fields["linear_conv_kernel_dim"],
        tuple(layer_type == "linear_attention" for layer_type in types),
    )
    return FamilyTraits(
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=_same_window(fields, None),
        qk_norm=True,
        variant=Variant(norm_offset=1.0, has_output_gate=True),
        recurrent=recurrent if any(recurrent.layers) else None,
    )


def _gated_experts(fields: Fields, *, normalizes: bool) -> ExpertsConfig:
    """Experts of a Qwen3.5 or Qwen3-Next, with one more that all tokens share."""
    experts = _qwen_experts(fields, normalizes=normalizes)
    return replace(experts, shared_size=fields["shared_expert_intermediate_size"])


def _attention_bias(fields: Fields) -> bool:
    return bool(fields.get("attention_bias", False))


def _same_window(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    return (window,) * int(fields["num_hidden_layers"])


def _windows_by_layer(fields: Fields) -> tuple[int | None, ...]:
    window: int | None = fields.get("sliding_window")
    if window is None:
        if "sliding_attention" in (fields.get("layer_types") or ()):
            raise ModelError("layer_types has sliding_attention, and sliding_window is not set or not used")
        return _same_window(fields, None)
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for layer_type in fields["layer_types"]:
        if layer_type not in windows:
            raise ModelError(f"layer type {layer_type!r} is not supported; supported are {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in fields["layer_types"])


def _by_architecture(families: Iterable[ModelFamily]) -> Mapping[str, ModelFamily]:
    return {family.architecture: family for family in families}


_QWEN_MTP = MtpForm("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", own_layer="layers.0.")
_MIMO_MTP = MtpForm(
    "model.mtp_layers.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", own_layer="0.",
    has_state_first=True, hides_first_token=True,
)  # fmt: skip
_FUSED_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_FUSED_RECURRENT = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v")}
_FUSED_GATE = {"gate_up_proj": ("gate_proj", "up_proj")}


def _hybrid(
    architecture: str,
    model_type: str,
    traits: Callable[[Fields], FamilyTraits] = _qwen3_5,
    *,
    text_types: tuple[str, ...] = (),
) -> ModelFamily:
    """A Qwen3.5, of which the text part is served where there are ``text_types``."""
    return ModelFamily(
        architecture,
        model_type,
        traits,
        feed_forward=sparse_mlp,
        has_partial_rotary=True,
        mtp=_QWEN_MTP,
        fused=_FUSED_RECURRENT,
        is_text_part=bool(text_types),
        text_types=text_types,
    )


def _text_part(architecture: str, model_type: str, traits: Callable[[Fields], FamilyTraits]) -> ModelFamily:
    """The text part of a Qwen that takes images: positions of text are the same in all dimensions of M-RoPE."""
    return ModelFamily(architecture, model_type, traits, is_text_part=True, text_types=(f"{model_type}_text",))


def _gemma4_part(architecture: str, model_type: str) -> ModelFamily:
    """The text part of a Gemma 4 that takes images and sound."""
    return replace(_text_part(architecture, model_type, _gemma4), has_layer_ropes=True, feed_forward=gemma4_mlp)


FAMILIES = _by_architecture(
    (
        ModelFamily("LlamaForCausalLM", "llama", _llama),
        ModelFamily("MistralForCausalLM", "mistral", _mistral),
        ModelFamily("Qwen2ForCausalLM", "qwen2", _qwen2),
        ModelFamily("Qwen3ForCausalLM", "qwen3", _qwen3),
        ModelFamily("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, feed_forward=sparse_mlp),
        ModelFamily("OlmoeForCausalLM", "olmoe", _olmoe, feed_forward=sparse_mlp),
        ModelFamily("MixtralForCausalLM", "mixtral", _mixtral, feed_forward=sparse_mlp),
        ModelFamily("GptOssForCausalLM", "gpt_oss", _gpt_oss, feed_forward=sparse_mlp),
        ModelFamily("MiMoForCausalLM", "mimo", _qwen2, reads_as="qwen2", mtp=_MIMO_MTP),
        ModelFamily("Gemma2ForCausalLM", "gemma2", _gemma2),
        ModelFamily("Gemma3ForCausalLM", "gemma3_text", _gemma3, has_layer_ropes=True),
        ModelFamily(
            "Gemma3ForConditionalGeneration",
            "gemma3",
            _gemma3_part,
            has_layer_ropes=True,
            is_text_part=True,
            text_types=("gemma3_text",),
        ),
        ModelFamily("Gemma4ForCausalLM", "gemma4_text", _gemma4, feed_forward=gemma4_mlp, has_layer_ropes=True),
        _gemma4_part("Gemma4ForConditionalGeneration", "gemma4"),
        ModelFamily(
            "Gemma4UnifiedForCausalLM", "gemma4_unified_text", _gemma4, feed_forward=gemma4_mlp, has_layer_ropes=True
        ),
        _gemma4_part("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
        ModelFamily("GlmForCausalLM", "glm", _glm, has_partial_rotary=True, rotates_pairs=True, fused=_FUSED_GATE),
        ModelFamily("Glm4ForCausalLM", "glm4", _glm4, has_partial_rotary=True, rotates_pairs=True, fused=_FUSED_GATE),
        ModelFamily("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, feed_forward=sparse_mlp, has_partial_rotary=True),
        _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text"),
        _hybrid("Qwen3_5ForConditionalGeneration", "qwen3_5", text_types=("qwen3_5_text",)),
        _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen3_5_moe),
        _hybrid("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _qwen3_5_moe, text_types=("qwen3_5_moe_text",)),
        ModelFamily(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            _qwen3_next,
            feed_forward=sparse_mlp,
            has_partial_rotary=True,
            mtp=_QWEN_MTP,
        ),
        ModelFamily("GraniteForCausalLM", "granite", _granite),
        ModelFamily(
            "Mistral3ForConditionalGeneration", "mistral3", _mistral, is_text_part=True, text_types=("mistral",)
        ),
        _text_part("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", _qwen2),
        _text_part("Qwen3VLForConditionalGeneration", "qwen3_vl", _qwen3),
        replace(
            _text_part("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", _qwen3_vl_moe), feed_forward=sparse_mlp
        ),
        ModelFamily("Olmo2ForCausalLM", "olmo2", _olmo2),
        ModelFamily("Olmo3ForCausalLM", "olmo3", _olmo3, has_layer_ropes=True),
        ModelFamily("Phi3ForCausalLM", "phi3", _phi3, has_partial_rotary=True, fused={**_FUSED_QKV, **_FUSED_GATE}),
    )
)
"""Families by the name of the architecture."""
_OTHER_NAMES = {"LLaMAForCausalLM": "LlamaForCausalLM"}
"""Other names of architectures, from the first conversions."""


def family_of(architecture: str) -> ModelFamily:
    """The family of an architecture; ``ModelError`` names the supported ones."""
    family = FAMILIES.get(_OTHER_NAMES.get(architecture, architecture))
    if family is None:
        raise ModelError(f"{architecture[:60]} is not supported; supported are {', '.join(FAMILIES)}")
    return family


def is_native(architecture: str) -> bool:
    """True if there is a family of an architecture."""
    return _OTHER_NAMES.get(architecture, architecture) in FAMILIES


def architecture_of(model_type: str) -> str:
    """The architecture of a ``model_type``; what is not known is returned as it is."""
    return next((one.architecture for one in FAMILIES.values() if one.model_type == model_type), model_type)
