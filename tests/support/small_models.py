"""A target of five tokens whose distributions can be enumerated, with a good and a bad draft made from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny_models import build_tiny_model, load_reference

VOCAB_SIZE = 5
PROMPT = (0, 1, 2, 3, 4, 0, 2, 4, 1, 3, 3)
"""Every token, and every token followed by several others: there is always something to look up."""


@dataclass(frozen=True, slots=True)
class SmallModels:
    """Folders."""

    target: Path
    good: Path
    """The target, a little flatter and a little off."""
    bad: Path
    """The target with its ranking reversed."""

    def draft(self, kind: str) -> Path | str | None:
        """ "good", "bad", "equal", "ngram", "suffix" or "none"."""
        drafts: dict[str, Path | str | None] = {"good": self.good, "bad": self.bad, "equal": self.target}
        return {**drafts, "ngram": "ngram", "suffix": "suffix", "none": None}[kind]


def build_small_models(folder: Path, *, vocab_size: int = VOCAB_SIZE, **config: Any) -> SmallModels:
    """Write all three below ``folder``; the same arguments give the same weights."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    }
    target = build_tiny_model(folder / "target", vocab_size=vocab_size, seed=3, **{**sizes, **config})
    noise = torch.randn((vocab_size, sizes["hidden_size"]), generator=torch.Generator().manual_seed(0))
    good = _with_head(target, folder / "good", lambda head: 0.8 * head + 0.05 * noise)
    return SmallModels(target, good, _with_head(target, folder / "bad", lambda head: -head))


def _with_head(source: Path, folder: Path, change: Callable[[Tensor], Tensor]) -> Path:
    shutil.copytree(source, folder)
    model = load_reference(source)
    with torch.no_grad():
        head = model.get_parameter("lm_head.weight")
        head.copy_(change(head))
    model.save_pretrained(folder)
    return folder
