"""Tiny random models in the Hugging Face layout, tokenizer included, for tests of the engine and of the services.

Weights are large enough for distributions to be far from flat, and every bias and norm is random, so that one left out
shows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:  # it takes seconds of a processor to import, and child processes find their models made
    from transformers import PreTrainedConfig, PreTrainedModel

EOS_TOKEN = "<|end|>"
DEFAULT_VOCAB_SIZE = 272

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 4,
}  # fmt: skip
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _VISION, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {**_VISION, "head_dim": 8}},
    "gemma4": {
        "audio_config": None,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "global_head_dim": 8,
            "position_embedding_size": 64,
        },
    },
    "gemma4_unified": {
        "audio_config": None,
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
    },
    "qwen2_5_vl": {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []}},
    "qwen3_vl_moe": {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []}},
    "qwen3_5": {"vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION},
}
"""Models whose decoder is one part; the rest of their configurations."""
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "head_dim": 16,
}  # fmt: skip
_GATED_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
_OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, **_GATED_EXPERTS},
    "qwen3_5_moe_text": {**_HYBRID, **_GATED_EXPERTS},
    "qwen3_next": {**_HYBRID, **_GATED_EXPERTS},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_vl_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}


def build_tiny_model(
    folder: Path | str,
    architecture: str = "llama",
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random model of an architecture (a ``model_type``) and its tokenizer to ``folder``.

    ``config`` overrides fields of its configuration; ``...`` leaves one out. The same arguments give the same weights.
    The tokenizer has an id for each byte that fits and the end token after them (``eos_token_id``); ids above it are
    padding. Below 257 rows it knows only the first characters of the printable ASCII range and drops the rest.
    """
    folder = Path(folder)
    end_id = min(256, vocab_size - 1)
    settings = {
        **_DEFAULTS,
        **_OF_ARCHITECTURE.get(architecture, {}),
        "vocab_size": vocab_size,
        "eos_token_id": end_id,
        **config,
    }
    settings = {name: value for name, value in settings.items() if value is not ...}
    model = _random_model(_config(architecture, settings), seed)
    torch.nn.Module.to(model, dtype)  # in place; transformers' own wrapper of it is not typed
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder, end_id)
    return folder


def cached_tiny_model(architecture: str = "llama", **arguments: Any) -> Path:
    """The same as ``build_tiny_model``, built once for all test runs on this machine; the folder must not be
    changed.
    """
    key = hashlib.sha256(json.dumps([architecture, arguments], sort_keys=True, default=str).encode()).hexdigest()[:16]
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / "outrider-tiny-models" / f"{architecture}-{source}-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent))
        build_tiny_model(building, architecture, **arguments)
        try:
            building.rename(folder)  # only a whole model ever has the name, whoever else builds it
        except OSError:
            shutil.rmtree(building)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """The transformers model of a folder in float32: the truth that the engine is held against."""
    from transformers import AutoConfig

    model: PreTrainedModel = _auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def _auto_class(config: PreTrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in _WITH_IMAGES else AutoModelForCausalLM


def _config(architecture: str, settings: dict[str, Any]) -> PreTrainedConfig:
    from transformers import AutoConfig

    if (rest := _WITH_IMAGES.get(architecture)) is not None:
        tied = settings["tie_word_embeddings"]
        settings = {**rest, "text_config": settings, "tie_word_embeddings": tied}
    config: PreTrainedConfig = AutoConfig.for_model(architecture, **settings)
    return config


def _random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    has_offset = config.model_type.startswith(("qwen3_5", "qwen3_next"))  # 1 is added to most norms' weights
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = _auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(
                    ("gate.weight", "router.weight", "router.proj.weight")
                ):  # of a router: tokens choose different experts, by clear margins
                    parameter.copy_(0.4 * torch.randn_like(parameter))
                elif name.endswith(".sinks"):
                    parameter.copy_(torch.randn_like(parameter))
                elif name.endswith("A_log"):  # states decay slowly, so that all tokens before matter
                    parameter.copy_(0.5 * torch.randn_like(parameter) - 3.0)
                elif parameter.dim() == 1 or name.endswith("_bias"):
                    is_factor = "norm" in name or name.endswith("scale")
                    mean = 1.0 if is_factor and not (has_offset and "linear_attn" not in name) else 0.0
                    parameter.copy_(0.2 * torch.randn_like(parameter) + mean)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.2 * torch.randn_like(buffer))
                elif name.endswith("layer_scalar"):
                    buffer.copy_(1.0 + 0.3 * torch.randn_like(buffer))
    return model


def _write_tokenizer(folder: Path, end_id: int) -> None:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, ord(c)))
    vocab = {character: index for index, character in enumerate(characters[:end_id])}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, EOS_TOKEN: end_id}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
