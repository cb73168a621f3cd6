"""Table of what is served: families and weight formats, and what each was compared with. ``docs/models.md`` is made
from it, and tests hold it against the registry of families and against the formats that they compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FamilySupport:
    """Models that are served by one architecture."""

    architecture: str
    models: str
    """Published models, for readers."""
    drafts: str
    """Drafts that work beside the draft model of the same vocabulary, prompt lookup and suffix decoding."""
    compared: str


@dataclass(frozen=True, slots=True)
class FallbackSupport:
    """Models of one ``model_type`` that have no family, and were tried through transformers."""

    model_type: str
    models: str
    refused: str = ""
    """Reason, as the error has it; empty: they are served."""


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """Weights in one format."""

    name: str
    """Name in ``quant_method`` of config.json and its fields."""
    weights: str
    activations: str
    kernels: str
    """Kernels on GPUs."""
    compared: Sequence[str]
    """Names of the formats in the tests; none: not quantized."""


_HEADS = "all"
_NONE = "none yet"
_MTP = "its own MTP layers"
_LOGITS = "transformers, float32: logits within 1e-4, in every shape of forward"
_HYBRID = (
    "transformers, float32: logits within 1e-4, in every shape of forward, after any number of accepted drafts; MTP"
    " with a layer of transformers"
)

FAMILIES = (
    FamilySupport("LlamaForCausalLM", "Llama 2, 3, 3.1, 3.2 and 3.3", _HEADS, _LOGITS),
    FamilySupport("MistralForCausalLM", "Mistral 7B, Nemo and Small 3, text", _HEADS, _LOGITS),
    FamilySupport("Qwen2ForCausalLM", "Qwen2, Qwen2.5 and QwQ, dense", _HEADS, _LOGITS),
    FamilySupport("Qwen3ForCausalLM", "Qwen3, dense", _HEADS, _LOGITS),
    FamilySupport("Qwen3MoeForCausalLM", "Qwen3 30B-A3B, 235B-A22B and Coder, with experts", _HEADS, _LOGITS),
    FamilySupport(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3.5 to 3.8, dense, text: layers with attention and Gated DeltaNet",
        _MTP,
        _HYBRID,
    ),
    FamilySupport("Qwen3_5ForCausalLM", "the same without images", _MTP, _HYBRID),
    FamilySupport("Qwen3_5MoeForConditionalGeneration", "Qwen3.5 to 3.8 with experts, text", _MTP, _HYBRID),
    FamilySupport("Qwen3_5MoeForCausalLM", "the same without images", _MTP, _HYBRID),
    FamilySupport("Qwen3NextForCausalLM", "Qwen3-Next 80B-A3B and Coder", _MTP, _HYBRID),
    FamilySupport("OlmoeForCausalLM", "OLMoE 1B-7B", _NONE, _LOGITS),
    FamilySupport("MixtralForCausalLM", "Mixtral 8x7B and 8x22B", _HEADS, _LOGITS),
    FamilySupport("GptOssForCausalLM", "gpt-oss 20B and 120B", _NONE, _LOGITS),
    FamilySupport("Gemma2ForCausalLM", "Gemma 2", _NONE, _LOGITS),
    FamilySupport("Gemma3ForCausalLM", "Gemma 3 270M and 1B", _NONE, _LOGITS),
    FamilySupport("Gemma3ForConditionalGeneration", "Gemma 3 4B, 12B and 27B, text", _NONE, _LOGITS),
    FamilySupport("Gemma4ForCausalLM", "Gemma 4", _NONE, _LOGITS),
    FamilySupport("Gemma4ForConditionalGeneration", "Gemma 4 E2B, E4B, 26B-A4B and 31B, text", _NONE, _LOGITS),
    FamilySupport("Gemma4UnifiedForCausalLM", "Gemma 4 12B", _NONE, _LOGITS),
    FamilySupport("Gemma4UnifiedForConditionalGeneration", "Gemma 4 12B, text", _NONE, _LOGITS),
    FamilySupport("GlmForCausalLM", "GLM-4 9B (0414 and before, converted)", _NONE, _LOGITS),
    FamilySupport("Glm4ForCausalLM", "GLM-4 and GLM-Z1, 9B and 32B, 0414", _NONE, _LOGITS),
    FamilySupport("Glm4MoeForCausalLM", "GLM-4.5, 4.5-Air, 4.6 and 4.7, with experts", _NONE, _LOGITS),
    FamilySupport("GraniteForCausalLM", "Granite 3.0 to 3.3, dense", _NONE, _LOGITS),
    FamilySupport(
        "Mistral3ForConditionalGeneration",
        "Mistral Small 3.1 and 3.2, Magistral and Devstral with images, text",
        _NONE,
        _LOGITS,
    ),
    FamilySupport("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL, text", _NONE, _LOGITS),
    FamilySupport("Qwen3VLForConditionalGeneration", "Qwen3-VL, dense, text", _NONE, _LOGITS),
    FamilySupport("Qwen3VLMoeForConditionalGeneration", "Qwen3-VL with experts, text", _NONE, _LOGITS),
    FamilySupport("Olmo2ForCausalLM", "OLMo 2", _NONE, _LOGITS),
    FamilySupport("Olmo3ForCausalLM", "OLMo 3", _NONE, _LOGITS),
    FamilySupport("Phi3ForCausalLM", "Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini and reasoning", _NONE, _LOGITS),
    FamilySupport("MiMoForCausalLM", "MiMo 7B", _MTP, "Qwen2's layers; MTP with a reference of its own"),
)

_NUMBERS_TOKENS = "its decoder numbers tokens by itself"
_INTERFACE = "its attention does not go through transformers' attention interface"
FALLBACKS = (
    FallbackSupport("afmoe", "Arcee Trinity, with experts"),
    FallbackSupport("apertus", "Apertus"),
    FallbackSupport("arcee", "Arcee AFM 4.5B"),
    FallbackSupport("biogpt", "BioGPT"),
    FallbackSupport("bitnet", "BitNet b1.58, in 16 bits"),
    FallbackSupport("cohere", "Command R"),
    FallbackSupport("cohere2", "Command R7B and A"),
    FallbackSupport("cwm", "Code World Model"),
    FallbackSupport("dbrx", "DBRX"),
    FallbackSupport("deepseek_v2", "DeepSeek V2"),
    FallbackSupport("deepseek_v3", "DeepSeek V3 and R1, in 16 bits"),
    FallbackSupport("dots1", "dots.llm1"),
    FallbackSupport("ernie4_5", "ERNIE 4.5 0.3B"),
    FallbackSupport("ernie4_5_moe", "ERNIE 4.5, with experts"),
    FallbackSupport("exaone4", "EXAONE 4"),
    FallbackSupport("exaone_moe", "K-EXAONE, with experts"),
    FallbackSupport("flex_olmo", "FlexOlmo, with experts"),
    FallbackSupport("gemma", "Gemma 1"),
    FallbackSupport("gemma3n_text", "Gemma 3n, text"),
    FallbackSupport("glm4_moe_lite", "GLM-4.7 Flash"),
    FallbackSupport("gpt2", "GPT-2"),
    FallbackSupport("gpt_bigcode", "StarCoder"),
    FallbackSupport("gpt_neox", "GPT-NeoX and Pythia"),
    FallbackSupport("granitemoe", "Granite 3, with experts"),
    FallbackSupport("granitemoehybrid", "Granite 4, without Mamba layers"),
    FallbackSupport("helium", "Helium"),
    FallbackSupport("hunyuan_v1_dense", "Hunyuan, dense"),
    FallbackSupport("hunyuan_v1_moe", "Hunyuan, with experts"),
    FallbackSupport("hyperclovax", "HyperCLOVA X SEED"),
    FallbackSupport("jetmoe", "JetMoE 8B"),
    FallbackSupport("mimo_v2_flash", "MiMo V2 Flash"),
    FallbackSupport("minimax_m2", "MiniMax M2"),
    FallbackSupport("minicpm3", "MiniCPM3"),
    FallbackSupport("ministral", "Ministral 8B"),
    FallbackSupport("ministral3", "Ministral 3"),
    FallbackSupport("nanochat", "nanochat"),
    FallbackSupport("nemotron", "Nemotron 3 and 4, Minitron"),
    FallbackSupport("olmo", "OLMo 1"),
    FallbackSupport("opt", "OPT"),
    FallbackSupport("persimmon", "Persimmon"),
    FallbackSupport("phi", "Phi 1 and 2"),
    FallbackSupport("phimoe", "PhiMoE without longrope"),
    FallbackSupport("qwen2_moe", "Qwen1.5 and Qwen2, with experts"),
    FallbackSupport("seed_oss", "Seed-OSS"),
    FallbackSupport("smollm3", "SmolLM3"),
    FallbackSupport("solar_open", "Solar Open, with experts"),
    FallbackSupport("stablelm", "StableLM 2"),
    FallbackSupport("starcoder2", "StarCoder 2"),
    FallbackSupport("vaultgemma", "VaultGemma"),
    FallbackSupport("bart", "BART", _NUMBERS_TOKENS),
    FallbackSupport("bloom", "BLOOM", _INTERFACE),
    FallbackSupport("diffllama", "DiffLlama", "layer 0 attends twice"),
    FallbackSupport("doge", "Doge", "it has attention masks of its own"),
    FallbackSupport("falcon", "Falcon", _INTERFACE),
    FallbackSupport("gptj", "GPT-J", _INTERFACE),
    FallbackSupport("lfm2", "LFM2", "layers of type conv are not supported"),
    FallbackSupport("llama4_text", "Llama 4", "layers of type chunked_attention are not supported"),
    FallbackSupport("mamba", "Mamba", "layers of type linear_attention are not supported"),
    FallbackSupport("mbart", "mBART, decoder", _NUMBERS_TOKENS),
    FallbackSupport("mpt", "MPT", _INTERFACE),
    FallbackSupport("nemotron_h", "Nemotron-H", "layers of type linear_attention, mlp, moe are not supported"),
    FallbackSupport("roberta", "RoBERTa, decoder", _NUMBERS_TOKENS),
    FallbackSupport("rwkv", "RWKV 4", _INTERFACE),
)
"""Fallback families: those that are served, then those that are not."""

_FP8 = "FP8 matrix unit, compute capability 9.0"

FORMATS = (
    FormatSupport("none", "float32, bfloat16, float16", "the same", "own and cuBLAS, compute capability 8.0", ()),
    FormatSupport(
        "fp8 with weight_block_size", "FP8, a scale for each block", "FP8, a scale for each group of a token",
        f"{_FP8}, blocks of 128 columns; others are widened", ("blocks", "wide blocks"),
    ),
    FormatSupport(
        "fp8 without", "FP8, a scale for each tensor", "FP8, a scale for each token or tensor", _FP8,
        ("tensor", "tensor, static"),
    ),
    FormatSupport(
        "compressed-tensors, float- or naive-quantized", "FP8, a scale for each tensor, channel, group or block",
        "unchanged, or FP8 with a scale for each token, group or tensor", _FP8,
        ("channel", "channel and head", "weights alone", "groups", "compressed static", "compressed blocks"),
    ),
    FormatSupport(
        "modelopt, FP8", "FP8, a scale for each tensor", "FP8, a scale for each tensor", _FP8, ("modelopt",)
    ),
    FormatSupport(
        "mxfp4", "FP4 (E2M1) of gpt-oss's experts, a power of two for each 32 columns", "unchanged",
        "widened in registers, compute capability 8.0", ("mxfp4",),
    ),
    FormatSupport(
        "--quantization fp8", "FP8, a scale for each channel, made while loading", "FP8, a scale for each token", _FP8,
        ("channel",),
    ),
)  # fmt: skip
