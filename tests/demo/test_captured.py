"""A captured training step leaves the gradients and the loss of the step that it was captured from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from demo_pair.captured import NUM_EAGER_CALLS, CapturedStep
from demo_pair.optimizer import Optimizer
from torch import Tensor, nn
from torch.nn import functional

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_a_function_that_is_called(device: str) -> None:
    torch.manual_seed(0)
    models = [_model().to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        Optimizer(model, steps=20, matrix_rate=0.02, other_rate=0.003, weight_decay=0.0, decay_share=0.5)
        for model in models
    ]
    plain, captured = _compute(models[0]), CapturedStep(_compute(models[1]), models[1].parameters())
    for step in range(NUM_EAGER_CALLS + 4):
        rows = torch.randint(0, 16, (4, 8), device=device)
        losses = plain(rows), captured(rows)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and theirs.grad.abs().sum() > 0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step(step)


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 16))


def _compute(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def compute(rows: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return compute
