"""One training loop for every model here: on the text itself, on a teacher's logits, or on both.

Owns losses and the loop.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demo_pair.model import Llama
from demo_pair.optimizer import Optimizer
from demo_pair.streams import Mixture

log = logging.getLogger(__name__)

OVERLAP_TEMPERATURES = (0.7, 1.0)


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Length and learning rate of the training."""

    steps: int
    rows: int = 16
    """Rows in a batch."""
    length: int = 2048
    """Tokens in a row."""
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.0
    decay_share: float = 0.5
    """Share of the steps over which the learning rate falls to nothing."""
    text_weight: float = 1.0
    """Weight of the cross entropy against the text."""
    teacher_weight: float = 0.0
    """Weight of the cross entropy against the teacher's distribution."""
    overlap_weight: float = 0.0
    """Weight of the total variation to the teacher's distribution: one minus the chance that rejection accepts."""


@dataclass(slots=True)
class History:
    """Record of a training run."""

    recipe: dict[str, Any]
    device: str
    seconds: float = 0.0
    train_loss: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 arithmetic on an accelerator, plain float32 elsewhere."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def device_name(device: torch.device) -> str:
    """Name of the device in the model card."""
    return f"one {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "a CPU"


def prepare(model: Llama, device: torch.device) -> Llama:
    """Move to the device; on an accelerator compile each layer (one compilation serves all layers of a shape)."""
    model.to(device)
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.automatic_dynamic_shapes = False
        for layer in model.model.layers:
            layer.compile()
    return model


def text_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy in nats.  # logits [B, T, V], ids [B, T]"""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def token_losses(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy against the teacher's distribution, and mean total variation from it over the temperatures, of
    each token.  # [..., V] to [...]
    """
    mine, teachers = logits.float(), teacher_logits.float()
    cross = -(functional.softmax(teachers, -1) * functional.log_softmax(mine, -1)).sum(-1)
    apart = [functional.softmax(teachers / t, -1) - functional.softmax(mine / t, -1) for t in OVERLAP_TEMPERATURES]
    variations = [0.5 * difference.abs().sum(-1) for difference in apart]
    return cross, sum(variations, torch.zeros_like(cross)) / len(apart)


def teacher_losses(logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Both of ``token_losses``, as means.  # [B, T, V]"""
    cross, variation = token_losses(logits, teacher_logits)
    return cross.mean(), variation.mean()


class Student:
    """A model in training."""

    def __init__(self, model: Llama, recipe: TrainingRecipe) -> None:
        self.model, self.recipe = model, recipe
        self.history = History(asdict(recipe), device_name(next(model.parameters()).device))
        self._optimizer = Optimizer(
            model,
            steps=recipe.steps,
            matrix_rate=recipe.matrix_rate,
            other_rate=recipe.other_rate,
            weight_decay=recipe.weight_decay,
            decay_share=recipe.decay_share,
        )
        on_accelerator = next(model.parameters()).is_cuda
        self._text_loss = torch.compile(text_loss) if on_accelerator else text_loss
        self._teacher_losses = torch.compile(teacher_losses) if on_accelerator else teacher_losses
        model.set_dropout(recipe.dropout)

    def learn(self, step: int, rows: Tensor, teacher_logits: Tensor | None) -> Tensor:
        """One step on rows [B, T + 1]; the loss comes back, not yet fetched from the device."""
        recipe = self.recipe
        self.model.train()
        with mixed_precision(rows.device):
            logits = self.model(rows[:, :-1])
        loss = logits.new_zeros((), dtype=torch.float32)
        if recipe.text_weight:
            loss = loss + recipe.text_weight * self._text_loss(logits, rows[:, 1:])
        if teacher_logits is not None:
            cross, variation = self._teacher_losses(logits, teacher_logits)
            loss = loss + recipe.teacher_weight * cross + recipe.overlap_weight * variation
        loss.backward()
        self._optimizer.step(step)
        return loss.detach()  # type: ignore[no-any-return]


def train(
    students: list[Student], data: Mixture, teacher: Llama | None, measure: Callable[[Llama], float], every: int
) -> None:
    """Train all students on the same rows; they must agree on steps and row sizes. `measure` runs `every` so often."""
    recipe = students[0].recipe
    device = next(students[0].model.parameters()).device
    began = time.monotonic()
    for step in range(recipe.steps):
        rows = data.rows(recipe.rows, recipe.length + 1)
        teacher_logits = _score(teacher, rows[:, :-1]) if teacher is not None else None
        losses = [student.learn(step, rows, teacher_logits) for student in students]
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            for student, loss in zip(students, losses, strict=True):
                _note(student, step + 1, loss.item(), measure(student.model), time.monotonic() - began)
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def _score(teacher: Llama, ids: Tensor) -> Tensor:
    with mixed_precision(ids.device):
        return teacher.eval()(ids)  # type: ignore[no-any-return]


def _note(student: Student, step: int, loss: float, held_out: float, seconds: float) -> None:
    student.history.train_loss.append((step, loss))
    student.history.held_out.append((step, held_out))
    student.history.seconds = seconds
    log.info("step %d: loss %.4f, held-out %.4f, %.0f s", step, loss, held_out, seconds)
