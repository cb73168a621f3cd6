"""Training of a block drafter on its target's states and distributions, and drafting with it in the reference loop.

Owns the loss over the tokens of random blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demo_pair.heads.dflash import DFlash
from demo_pair.heads.eagle3 import read_target
from demo_pair.heads.eagle3_training import HeadRecipe, optimizer_of
from demo_pair.sampling import distribution, draw
from demo_pair.training import mixed_precision, token_losses

TOKENS_OF_A_ROW = 420
"""Number of tokens that the blocks of a row draft: a multiple of all lengths up to 7, so that the loss compiles once.
"""


class BlockTrainer:
    """A drafter in training."""

    def __init__(self, head: DFlash, recipe: HeadRecipe) -> None:
        self.head, self.recipe = head, recipe
        self._device = next(head.parameters()).device
        self._losses = torch.compile(token_losses) if self._device.type == "cuda" else token_losses
        self._optimizer = optimizer_of(head, recipe)
        self._draw = torch.Generator().manual_seed(0)

    def learn(self, step: int, ids: Tensor) -> Tensor:
        """One step on rows [B, T] at the learning rate of ``step``; the loss comes back, not yet fetched.

        All blocks of a step are of one length, which is drawn: a block is as long as the tokens that are asked for.
        """
        batch, length = ids.shape
        drafts = int(torch.randint(1, self.head.shape.block_size, (), generator=self._draw))
        count = max(1, TOKENS_OF_A_ROW // drafts)
        anchors = torch.randint(1, length - drafts, (batch, count), generator=self._draw).to(self._device)
        with mixed_precision(self._device):
            states, teacher = read_target(self.head.target, ids, self.head.shape.layers)
            logits = self.head(ids, states, anchors, drafts)
        number = torch.arange(drafts, device=self._device)
        rows = torch.arange(batch, device=self._device)[:, None, None]
        wanted = teacher[rows, anchors[..., None] + number]  # [B, N, K, V]
        cross, variation = self._losses(logits.flatten(1, 2), wanted.flatten(1, 2))  # [B, N * K] each
        weights = torch.pow(self.recipe.step_decay, number)
        losses = (cross + self.recipe.overlap_weight * variation).reshape(batch, count, drafts)
        loss = (losses * (weights / weights.sum())).sum(-1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(step)
        return loss.detach()


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """A drafter as the reference loop's draft: everything is computed anew for each proposal."""

    head: DFlash

    @torch.no_grad()
    def propose(
        self, ids: Tensor, lengths: Tensor, *, draft_length: int, temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Write a proposal behind each row of ids; tokens [B, K] and what they were drawn from [B, K, V]."""
        text = ids[:, : int(lengths.max())]
        states, _ = read_target(self.head.target, text, self.head.shape.layers)
        probs = distribution(self.head(text, states, lengths[:, None] - 1, draft_length)[:, 0], temperature)
        tokens = draw(probs.flatten(0, 1), generator).view(-1, draft_length)
        ids.scatter_(1, lengths[:, None] + torch.arange(draft_length, device=ids.device), tokens)
        return tokens, probs
