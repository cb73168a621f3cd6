"""Recipe of a synthetic model: a few numbers beside its ``config.json``.

Owns ``synthetic.json`` and the way from it to tensors. With it no weights need to lie on a disk: load format
"synthetic" makes them where they are used, the same for the same recipe and the same kind of device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.limits.bounded_files import read_of_folder
from outrider.model_executor.synthetic.cycle import PairMap, build_map
from outrider.model_executor.synthetic.weights import Sizes, Successors, WeightMaker

FILE = "synthetic.json"
ROLES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One model of a pair."""

    role: str
    """target or draft."""
    acceptance: float
    """Share of tokens after which the draft's choice is the target's."""
    foreseen: float = 0.0
    """Share of the other positions where the true token is the draft's second choice."""
    seed: int = 0
    cycle_size: int | None = None
    """Tokens that decoding walks; None: all."""
    later_acceptance: float | None = None
    """Acceptance in the second half of the cycle, if it is another one."""

    def successors(self, vocab_size: int) -> Successors:
        """Next token of the model for every token; ``ValueError`` for invalid shares."""
        pair = self.map_of(vocab_size)
        none = np.full_like(pair.order, -1)
        if self.role == "target":
            return Successors(pair.target_next, none)
        return Successors(pair.draft_next, np.where(pair.foreseen, pair.target_next, none))

    def map_of(self, vocab_size: int) -> PairMap:
        """Next tokens of both models of the pair; ``ValueError`` for invalid shares."""
        return build_map(
            vocab_size,
            acceptance=self.acceptance,
            foreseen=self.foreseen,
            seed=self.seed,
            cycle_size=self.cycle_size,
            later_acceptance=self.later_acceptance,
        )

    def maker(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> WeightMaker:
        """Function that makes the weights of a model of these sizes."""
        seed = 2 * self.seed + ROLES.index(self.role)
        return WeightMaker(sizes, self.successors(sizes.vocab_size), seed, dtype, device)


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Put it beside the folder's ``config.json``."""
    content = {
        "synthetic": "random weights; the next token is a function of the last one",
        **dataclasses.asdict(recipe),
    }
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_recipe(folder: Path) -> Recipe:
    """The folder's recipe; ``ModelError`` when it has none or it is no recipe."""
    path = folder / FILE
    try:
        content = json.loads(read_of_folder(folder, FILE))
        recipe = Recipe(
            role=str(content["role"]),
            acceptance=float(content["acceptance"]),
            foreseen=float(content["foreseen"]),
            seed=int(content["seed"]),
            cycle_size=None if content.get("cycle_size") is None else int(content["cycle_size"]),
            later_acceptance=None if content.get("later_acceptance") is None else float(content["later_acceptance"]),
        )
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no {FILE}: load_format synthetic is for folders of tools/make_pair.py"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{path} is no recipe of a synthetic model: {error!r}") from error
    if recipe.role not in ROLES:
        raise ModelError(f"{path}: role must be target or draft, not {recipe.role!r}")
    return recipe


def synthetic_tensors(
    folder: Path, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every weight of the folder's model, made one at a time on ``device``."""
    recipe = read_recipe(folder)
    try:
        maker = recipe.maker(sizes, dtype, device)
    except ValueError as error:
        raise ModelError(f"{folder / FILE}: {error}") from error
    yield from maker.tensors()
