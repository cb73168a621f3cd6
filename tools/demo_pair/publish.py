"""Writes a model as a Hugging Face folder, and reads one back.

Owns the layout and its size limits.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_pair.corpus import BOS, BOS_ID, EOS, EOS_ID
from demo_pair.heads.dflash import MASK_ID, BlockShape, DFlash
from demo_pair.heads.eagle3 import Eagle3, HeadShape
from demo_pair.model import Llama, TrainedShape

LARGEST_SHARD_BYTES = 14_000_000


def publish(state: dict[str, Tensor], shape: TrainedShape, tokenizer_file: Path, folder: Path) -> None:
    """Write config, bfloat16 weights and tokenizer into `folder`, replacing what is there."""
    _make_empty(folder)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    _write_json(folder / "special_tokens_map.json", {"bos_token": BOS, "eos_token": EOS})
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    _write_weights(state, folder)


def load(folder: Path) -> Llama:
    """The published model, its bfloat16 weights upcast to float32."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(_shape(config))
    model.load_state_dict(_read_weights(folder))
    return model.eval()


def publish_head(head: Eagle3, folder: Path) -> None:
    """Write config and bfloat16 weights of a head, in SafeAILab's layout, replacing what is there. The embedding is the
    target's.
    """
    _make_empty(folder)
    shape, target = head.shape, head.target.shape
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": target.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
    }
    _write_json(folder / "config.json", {**_config(target), **own})
    _write_weights(head.state_dict(), folder)


def load_head(folder: Path, target: Llama) -> Eagle3:
    """The published head, its bfloat16 weights upcast to float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = HeadShape(
        layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    head = Eagle3(shape, target)
    head.load_state_dict(_read_weights(folder))
    return head.to(next(target.parameters()).device).eval()


def publish_block_drafter(head: DFlash, folder: Path) -> None:
    """Write config and bfloat16 weights of a block drafter, in z-lab's layout, replacing what is there. Embedding and
    last product are the target's.
    """
    _make_empty(folder)
    shape, target = head.shape, head.target.shape
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        # z-lab counts layers from 0 and means what comes out of them.
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [layer - 1 for layer in shape.layers]},
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": target.num_layers,
    }
    _write_json(folder / "config.json", {**_config(target), **own})
    _write_weights(head.state_dict(), folder)


def load_block_drafter(folder: Path, target: Llama) -> DFlash:
    """The published block drafter, its bfloat16 weights upcast to float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = BlockShape(
        layers=tuple(layer + 1 for layer in config["dflash_config"]["target_layer_ids"]),
        block_size=config["block_size"],
        num_layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    head = DFlash(shape, target)
    head.load_state_dict(_read_weights(folder))
    return head.to(next(target.parameters()).device).eval()


def _config(shape: TrainedShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _shape(config: dict[str, Any]) -> TrainedShape:
    return TrainedShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )


def _tokenizer_config(shape: TrainedShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
    }


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Upcast to float32."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return {name: tensor.float() for name, tensor in state.items()}


def _write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    state = {name: tensor.to(torch.bfloat16).contiguous().cpu() for name, tensor in weights.items()}
    shards = _shards(state)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in state.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})


def _shards(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in state.items():
        if used + tensor.nbytes > LARGEST_SHARD_BYTES and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
