"""Driving a runner beside its transformers reference, for the tests that hold one against the other."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from outrider.kv_cache import KVSequence
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from tests.support.scattering import take_every_other_page
from tests.support.tiny_models import cached_tiny_model, load_reference

TOLERANCE = 1e-4


def random_ids(count: int, seed: int, vocab_size: int = 272) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def reference(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = load_reference(folder)
    return model


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The whole text in one dense forward: [len(token_ids), V]."""
    with torch.no_grad():
        logits: torch.Tensor = reference(folder)(torch.tensor([token_ids])).logits[0]
    return logits


def poisoned_runner(
    folder: Path, *, page_size: int, num_pages: int = 800, scattered: bool = False, **options: Any
) -> ModelRunner:
    """A runner whose every free KV slot is NaN; ``scattered``: no two free pages are neighbours."""
    runner = ModelRunner.load(folder, dtype="float32", page_size=page_size, num_pages=num_pages, **options)
    if scattered:
        take_every_other_page(runner.sequences)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    return runner


def build(architecture: str, **config: Any) -> Path:
    return cached_tiny_model(architecture, **config)


class Scripted:
    """One sequence of a runner, every logit of which is compared with the reference's."""

    def __init__(self, runner: ModelRunner, folder: Path, sequence: KVSequence) -> None:
        self.runner = runner
        self.folder = folder
        self.sequence = sequence

    def row(self, token_ids: list[int], num_logits: int | None = None) -> ForwardRow:
        return ForwardRow(self.sequence, token_ids, len(token_ids) if num_logits is None else num_logits)

    def check(self, logits: torch.Tensor) -> None:
        """Compare logits of the last positions with the reference's of the whole text."""
        assert logits.dtype == torch.float32
        expected = reference_logits(self.folder, self.sequence.token_ids)[self.sequence.length - len(logits) :]
        torch.testing.assert_close(logits.clone(), expected, atol=TOLERANCE, rtol=0)


def open_scripted(runner: ModelRunner, folder: Path, max_length: int) -> Scripted:
    return Scripted(runner, folder, runner.sequences.open(max_length))


def forward_and_check(runner: ModelRunner, *rows: tuple[Scripted, list[int], int | None]) -> None:
    """One ragged forward of (sequence, token ids, logits wanted: None is all), each row compared."""
    forward_rows = [scripted.row(token_ids, num_logits) for scripted, token_ids, num_logits in rows]
    parts = torch.split(runner.forward(forward_rows), [row.num_logits for row in forward_rows])
    for (scripted, _, _), logits in zip(rows, parts, strict=True):
        scripted.check(logits)
    runner.sequences.check_integrity()
