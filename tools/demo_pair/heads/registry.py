"""The kinds of head that the tool trains for the shipped target.

Owns which parts of this package belong to which kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from demo_pair import publish
from demo_pair.heads.dflash import BLOCK_SHAPE, DFlash
from demo_pair.heads.dflash_training import BlockDraft, BlockTrainer
from demo_pair.heads.eagle3 import HEAD_SHAPE, Eagle3
from demo_pair.heads.eagle3_training import HeadDraft, HeadRecipe, HeadTrainer
from demo_pair.measuring import MeasuredDraft
from demo_pair.model import Llama
from demo_pair.recipes import BLOCK, HEAD


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind."""

    make: Callable[[Llama], nn.Module]
    load: Callable[[Path, Llama], nn.Module]
    """Published weights, to continue training."""
    trainer: Callable[[Any, HeadRecipe], Any]
    recipe: HeadRecipe
    publish: Callable[[Any, Path], None]
    load_draft: Callable[[Path, Llama], MeasuredDraft]
    """Draft of a published folder in the reference loop."""


HEADS: Mapping[str, HeadKind] = {
    "eagle3": HeadKind(
        make=lambda target: Eagle3(HEAD_SHAPE, target),
        load=publish.load_head,
        trainer=HeadTrainer,
        recipe=HEAD,
        publish=publish.publish_head,
        load_draft=lambda folder, target: HeadDraft(publish.load_head(folder, target)),
    ),
    "dflash": HeadKind(
        make=lambda target: DFlash(BLOCK_SHAPE, target),
        load=publish.load_block_drafter,
        trainer=BlockTrainer,
        recipe=BLOCK,
        publish=publish.publish_block_drafter,
        load_draft=lambda folder, target: BlockDraft(publish.load_block_drafter(folder, target)),
    ),
}
"""Heads by the method's name, which is the folder's too."""
