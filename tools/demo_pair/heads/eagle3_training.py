"""Training of an EAGLE-3 head on its target's states and distributions, and drafting with it in the reference loop.

Owns the loss over the steps of the training-time test.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demo_pair.captured import CapturedStep
from demo_pair.heads.eagle3 import NUM_STEPS, Eagle3, Steps, read_target
from demo_pair.optimizer import Optimizer
from demo_pair.sampling import distribution, draw
from demo_pair.streams import Mixture
from demo_pair.training import History, device_name, mixed_precision, teacher_losses

log = logging.getLogger(__name__)

_NOTES_PER_RUN = 10
_STEPS_AHEAD = 20


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """Length and learning rate of the training."""

    steps: int
    rows: int = 64
    length: int = 512 + NUM_STEPS
    """Columns are fewer than tokens by the steps of the training-time test; products prefer 512 of them to 507."""
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.02
    decay_share: float = 0.6
    overlap_weight: float = 3.0
    step_decay: float = 0.9
    """Weight of each draft token over that of the one before."""
    max_seconds: float | None = None
    """The learning rate falls to nothing by then, however many steps that are."""


def optimizer_of(head: nn.Module, recipe: HeadRecipe) -> Optimizer:
    """Optimizer of a head."""
    return Optimizer(
        head, steps=recipe.steps, matrix_rate=recipe.matrix_rate, other_rate=recipe.other_rate,
        weight_decay=recipe.weight_decay, decay_share=recipe.decay_share,
    )  # fmt: skip


class HeadTrainer:
    """A head in training."""

    def __init__(self, head: Eagle3, recipe: HeadRecipe) -> None:
        self.head, self.recipe = head, recipe
        self._device = next(head.parameters()).device
        self._losses = teacher_losses
        if self._device.type == "cuda":
            self._losses = torch.compile(teacher_losses)
            head.midlayer.compile()
        self._optimizer = optimizer_of(head, recipe)
        self._compute = CapturedStep(self._leave_gradients, head.parameters())

    def learn(self, step: int, ids: Tensor) -> Tensor:
        """One step on rows [B, T] at the learning rate of ``step``; the loss comes back, not yet fetched."""
        loss = self._compute(ids)
        self._optimizer.step(step)
        return loss

    def _leave_gradients(self, ids: Tensor) -> Tensor:
        recipe = self.recipe
        with mixed_precision(self._device):
            states, teacher = read_target(self.head.target, ids, self.head.shape.layers)
            logits = self.head(ids, states)
        loss, weight = torch.zeros((), device=self._device), 1.0
        for number, own in enumerate(logits, 1):
            cross, variation = self._losses(own, teacher[:, number : number + own.shape[1]])
            loss = loss + weight * (cross + recipe.overlap_weight * variation)
            weight *= recipe.step_decay
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def train_head(
    head: Any,  # noqa: ANN401 - a module with its target
    recipe: HeadRecipe,
    data: Mixture,
    make_trainer: Callable[[Any, HeadRecipe], Any] = HeadTrainer,
) -> History:
    """Train on the target's distributions; the head is left in evaluation mode."""
    trainer, began = make_trainer(head, recipe), time.monotonic()
    device = next(head.parameters()).device
    history = History(asdict(recipe), device_name(device))
    done, step, noted = 0.0, 0, 0
    head.target.eval()
    head.train()
    while done < 1:
        # Two clocks: the schedule follows whichever says that less is left.
        loss = trainer.learn(int(done * recipe.steps), data.rows(recipe.rows, recipe.length))
        step += 1
        if step % _STEPS_AHEAD == 0:
            loss.item()  # else the clock would tell when work was queued
        spent = time.monotonic() - began
        done = max(step / recipe.steps, spent / recipe.max_seconds if recipe.max_seconds else 0.0)
        if done * _NOTES_PER_RUN >= noted + 1:
            noted += 1
            history.train_loss.append((step, loss.item()))
            log.info("step %d: loss %.4f, %.0f s", step, loss.item(), spent)
    history.seconds = time.monotonic() - began
    history.recipe["steps"] = step
    head.eval()
    return history


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """A head as the reference loop's draft: everything is computed anew for each proposal."""

    head: Eagle3

    @torch.no_grad()
    def propose(
        self, ids: Tensor, lengths: Tensor, *, draft_length: int, temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Write a proposal behind each row of ids; tokens [B, K] and what they were drawn from [B, K, V]."""
        head, rows = self.head, torch.arange(ids.shape[0], device=ids.device)
        count, steps = int(lengths.max()) - 1, Steps()
        states, _ = read_target(head.target, ids[:, :count], head.shape.layers)
        hidden, columns = head.fc(states), lengths - 2
        tokens, probs = [], []
        for number in range(draft_length):
            hidden = head.step(number, ids[:, number + 1 : number + 1 + count], hidden, steps)
            probs.append(distribution(head.logits(hidden[rows, columns][:, None])[:, 0], temperature))
            tokens.append(draw(probs[-1], generator))
            ids[rows, lengths + number] = tokens[-1]
        return torch.stack(tokens, 1), torch.stack(probs, 1)
