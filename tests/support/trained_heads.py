"""Every head that reads hidden states, for one target: written at random, trained until it knows a few texts by heart,
and turned round, so that it drafts what it holds to be the least likely.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from outrider.config.fields import DraftMethod
from tests.draft_service.test_state_heads import medusa, speculator
from tests.support.dflash import TARGET_LAYER_IDS, DFlashReference, build_dflash
from tests.support.eagle3 import build_eagle3, fit_eagle3
from tests.support.pair_heads import EagleReference, MtpReference, PairReference, build_eagle
from tests.support.tiny_models import load_reference

Tensors = dict[str, Tensor]
Texts = Sequence[Sequence[int]]

WRITE: Mapping[DraftMethod, Callable[[Path], object]] = {
    DraftMethod.EAGLE: build_eagle,
    DraftMethod.EAGLE3: lambda folder: build_eagle3(folder, draft_vocab_size=272),
    DraftMethod.DFLASH: build_dflash,
    DraftMethod.MEDUSA: medusa,
    DraftMethod.MLP_SPECULATOR: speculator,
}
"""Writers of random heads; an MTP layer lies in the target's folder."""
NUM_STEPS, RATE, BLOCK = 80, 0.02, 3
_BLOCK_STEPS = 45
_MTP_LAYER = "model.mtp_layers.0."


def write_head(method: DraftMethod, folder: Path, target: Path) -> Path:
    """A random head for ``target``, whose MTP layer is the head of ``mtp``."""
    if method is DraftMethod.MTP:
        shutil.copytree(target, folder)
    else:
        WRITE[method](folder)
    return folder


def train_head(method: DraftMethod, folder: Path, body: Path, texts: Texts) -> None:
    """Train the head of a folder; ``body`` is the target as transformers knows it."""
    if method is DraftMethod.EAGLE3:
        fit_eagle3(folder, body, [list(text) for text in texts], num_steps=NUM_STEPS)
    elif method is DraftMethod.EAGLE:
        eagle = EagleReference(folder, body)
        _train_pairs(eagle, texts)
        _replace(folder, {name if name.startswith("fc.") else f"layers.0.{name}": own for name, own in eagle.w.items()})
    elif method is DraftMethod.MTP:
        layer = MtpReference(folder, body)
        _train_pairs(layer, texts)
        _replace(folder, {f"{_MTP_LAYER}{name}": own for name, own in layer.w.items()})
    elif method is DraftMethod.DFLASH:
        _train_blocks(DFlashReference(folder, body), folder, texts)
    else:
        _train_state_head(method, folder, body, texts)


def turn_round(method: DraftMethod, folder: Path, body: Path) -> None:
    """Have the head of a folder prefer what it thought the least of."""
    stored = load_file(folder / "model.safetensors")
    if method is DraftMethod.EAGLE:  # with a last product of its own
        stored["lm_head.weight"] = load_reference(body).lm_head.weight.detach().clone()
    last = {
        DraftMethod.EAGLE: "lm_head.",
        DraftMethod.EAGLE3: "lm_head.",
        DraftMethod.MTP: f"{_MTP_LAYER}final_layernorm.",
        DraftMethod.DFLASH: "norm.",
        DraftMethod.MEDUSA: "lm_heads.",
        DraftMethod.MLP_SPECULATOR: "speculator.head.",
    }[method]
    _replace(folder, {name: -tensor for name, tensor in stored.items() if name.startswith(last)})


def _replace(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    changed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file({**load_file(path), **changed}, path)


def _minimize(trained: Iterable[Tensor], loss_of: Callable[[int], Tensor], num_steps: int = NUM_STEPS) -> None:
    optimizer = torch.optim.Adam([tensor.requires_grad_() for tensor in trained], lr=RATE)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _last_states(body: Path, texts: Texts) -> list[Tensor]:
    """[n, H] of each text."""
    model: Any = load_reference(body)
    with torch.no_grad():
        return [model.model(torch.tensor([list(text)])).last_hidden_state[0] for text in texts]


def _train_pairs(reference: PairReference, texts: Texts) -> None:
    """Train on the target's states alone, as EAGLE is trained without its noise."""
    with torch.no_grad():
        states = [reference.target.model(torch.tensor([list(text)])).last_hidden_state[0] for text in texts]

    def loss(_: int) -> Tensor:
        found = torch.zeros(())
        for text, own in zip(texts, states, strict=True):
            following = reference.run(reference.embedding[torch.tensor(text[1:-1])], own[:-2])
            found = found + F.cross_entropy(F.linear(following, reference.head), torch.tensor(text[2:]))
        return found

    _minimize(reference.w.values(), loss)


def _train_blocks(reference: DFlashReference, folder: Path, texts: Texts) -> None:
    """Train on blocks at every third position, other ones each step."""
    contexts: list[Tensor] = []
    with torch.no_grad():
        for text in texts:
            found = reference.target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
            contexts.append(torch.cat([found[layer + 1][0] for layer in TARGET_LAYER_IDS], dim=-1))

    def loss(step: int) -> Tensor:
        found = torch.zeros(())
        for text, context in zip(texts, contexts, strict=True):
            for anchor in range(step % 3, len(text) - BLOCK, 3):
                states = reference.block_over(context[:anchor], text[anchor], BLOCK)
                wanted = torch.tensor(text[anchor + 1 : anchor + 1 + BLOCK])
                found = found + F.cross_entropy(F.linear(states, reference.head), wanted)
        return found

    _minimize(reference.w.values(), loss, _BLOCK_STEPS)
    _replace(folder, reference.w)


def _train_state_head(method: DraftMethod, folder: Path, body: Path, texts: Texts) -> None:
    weights = load_file(folder / "model.safetensors")
    logits_of = _medusa_logits if method is DraftMethod.MEDUSA else _speculator_logits
    states = _last_states(body, texts)

    def loss(_: int) -> Tensor:
        found = torch.zeros(())
        for text, own in zip(texts, states, strict=True):
            ids, count = torch.tensor(text), len(text) - 4
            for place, logits in enumerate(logits_of(weights, own[:count], ids)):
                found = found + F.cross_entropy(logits, ids[2 + place : 2 + place + count])
        return found

    _minimize(weights.values(), loss)
    _replace(folder, weights)


def _medusa_logits(weights: Tensors, states: Tensor, ids: Tensor) -> list[Tensor]:
    """[n, V] of the tokens two places and more after each of ``states`` [n, H]."""
    found = []
    for head in range(3):
        own = states
        for layer in range(2):
            own = own + F.silu(F.linear(own, weights[f"blocks.{head}.layers.{layer}.weight"]))
        found.append(F.linear(own, weights[f"lm_heads.{head}.weight"]))
    return found


def _speculator_logits(weights: Tensors, states: Tensor, ids: Tensor) -> list[Tensor]:
    """The same; each stage is told the token before the one that it gives."""
    state_weight = 0.5 ** (0.5 / 3)
    mixing = math.sqrt((1 - state_weight**2) * (24 / 2)) / state_weight
    found, count = [], states.shape[0]
    for stage in range(3):
        projection, embedding, norm, bias, head = (
            weights[f"speculator.{name}.{stage}.{kind}"]
            for name, kind in (
                ("proj", "weight"), ("emb", "weight"), ("ln", "weight"), ("ln", "bias"), ("head", "weight"),
            )
        )  # fmt: skip
        mixed = F.linear(states, projection) + mixing * embedding[ids[1 + stage : 1 + stage + count]]
        states = F.gelu(norm * (mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + 1e-6)) + bias)
        found.append(F.linear(states, head))
    return found
