"""The optimisers: Muon for the matrices of the layers, AdamW for embeddings, last products and norms.

Owns the update rules and the learning-rate schedule.
Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon/ (momentum, then the nearest semi-orthogonal matrix).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# A quintic whose repeated use drives every singular value to about one.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ROUNDS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """The semi-orthogonal factor of each matrix, roughly.  # [N, R, C] -> [N, R, C]"""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)  # type: ignore[no-any-return]


class Muon:
    """Momentum, orthogonalised; matrices of one shape are worked on as one batch."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], rate: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.rate, self.weight_decay, self.momentum = rate, weight_decay, momentum
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = [(group, [torch.zeros_like(matrix) for matrix in group]) for group in groups.values()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the full learning rate."""
        for group, velocities in self._groups:
            gradients = [matrix.grad for matrix in group if matrix.grad is not None]
            torch._foreach_lerp_(velocities, gradients, 1 - self.momentum)
            looking_ahead = torch._foreach_lerp(gradients, velocities, self.momentum)
            updates = orthogonalise(torch.stack(looking_ahead))
            rows, columns = group[0].shape
            rate = self.rate * scale
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(updates.unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)


class Optimizer:
    """Muon and AdamW side by side under one schedule: warm-up, hold, straight line down to nothing."""

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int,
        matrix_rate: float,
        other_rate: float,
        weight_decay: float,
        decay_share: float,
    ) -> None:
        named = list(model.named_parameters())
        rows_of_tokens = [name for name, _ in named if "embed" in name or "lm_head" in name]
        matrices = [p for name, p in named if p.ndim == 2 and name not in rows_of_tokens]
        others = [p for name, p in named if p.ndim != 2 or name in rows_of_tokens]
        self._muon = Muon(matrices, matrix_rate, weight_decay)
        self._adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._model, self._other_rate = model, other_rate
        self._steps, self._decay_share, self._warm_up = steps, decay_share, max(1, min(100, steps // 10))

    def scale(self, step: int) -> float:
        """The share of the full learning rate that `step` uses."""
        left = (self._steps - step) / (self._steps * self._decay_share)
        return min(1.0, (step + 1) / self._warm_up, left)

    def step(self, step: int) -> None:
        """Apply the gradients and clear them."""
        scale = self.scale(step)
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * scale
        self._adam.step()
        self._muon.step(scale)
        self._model.zero_grad(set_to_none=True)
