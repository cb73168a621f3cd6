"""A model that says a text of the test's choice: after each token comes the one that follows it there, then the end.

A real Llama folder: the embedding of a token is a direction of its own, the layers add nothing, and the head reads from
that direction what comes next. So no token may stand twice in the text; tokens are the bytes of its UTF-8.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import EOS_TOKEN, build_tiny_model

NUM_ROWS = 272
END = 256


def build_parrot(folder: Path, text: str, *, eos_token_ids: list[int] | None = None, then: str = "") -> Path:
    """``then`` is what comes after the end of sequence, for those who ignore it."""
    build_tiny_model(folder, "llama", vocab_size=NUM_ROWS, hidden_size=NUM_ROWS, num_hidden_layers=1)
    ids = [*token_ids_of(folder, text), END, *token_ids_of(folder, then)]
    if len(set(ids)) != len(ids):
        raise ValueError("a byte stands twice in the text")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "norm" in name:
            weight.fill_(1.0)
        elif "layers" in name:
            weight.zero_()
    head = torch.zeros(NUM_ROWS, NUM_ROWS)
    for before, after in zip(ids, [*ids[1:], ids[0]], strict=True):
        head[after, before] = 1.0
    weights["model.embed_tokens.weight"] = torch.eye(NUM_ROWS)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if eos_token_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_ids}), encoding="utf-8")
    return folder


def token_ids_of(folder: Path, text: str) -> list[int]:
    """The ids of a text's bytes."""
    vocab: dict[str, int] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    by_byte = {byte: vocab[character] for byte, character in _byte_characters().items()}
    return [by_byte[byte] for byte in text.encode()]


def _byte_characters() -> dict[int, str]:
    """Visible characters that byte-level tokenizers write for bytes."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + index) for index, byte in enumerate(rest)}


__all__ = ["END", "EOS_TOKEN", "NUM_ROWS", "build_parrot", "token_ids_of"]
