"""A model on one GPU, then shared by two: tokens and logits of both, written to a file.

Run as a module by ``test_gpu_path.py``: a process is part of one group in its life, so each way takes a process.
"""

from __future__ import annotations

import contextlib
import sys

import torch

from outrider.config import TargetSettings
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from tests.support.tiny_models import cached_tiny_model

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
NUM_STEPS = 60


def opened(size: int, *, one_shot: bool) -> contextlib.closing[ModelRunner]:
    settings = {"device": "cuda", "dtype": "float32", "page_size": 4, "num_pages": 400}
    sharing = {"tensor_parallel_size": size, "one_shot_all_reduce": one_shot}
    folder = cached_tiny_model("llama", seed=1, **SHAPE)
    return contextlib.closing(open_runner(TargetSettings.model_validate({"model": str(folder), **settings, **sharing})))


def said(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits of all that is run: prefill, decoding, scoring beside it, rollback, a fork, and a
    step over a token that only the device knows.
    """
    first, second = runner.sequences.open(200), runner.sequences.open(200)
    logits, tokens = [runner.forward([ForwardRow(first, list(range(3, 40)), 1)])], []
    for step in range(NUM_STEPS):
        token = int(logits[-1][-1].argmax())
        tokens.append(token)
        if step % 5 == 0:
            rows = [ForwardRow(second, [token] * 3, 3), ForwardRow(first, [1, 2, 3, 4, 5], 5)]
            logits.append(runner.forward(rows))
            runner.sequences.truncate(first, first.length - 5)
        logits.append(runner.forward([ForwardRow(first, [token], 1)]))
    forked = runner.sequences.fork(first, 150)
    logits.append(runner.forward([ForwardRow(forked, [7, 8], 2), ForwardRow(first, [9], 1)]))
    with torch.inference_mode():
        drawn = logits[-1][-1:].argmax(-1).int()
        logits.append(runner.forward_batch(RowBatch.drawn([first]), drawn=drawn)[0].float())
    return tokens, torch.cat(logits).cpu()


def main(path: str, *, one_shot: bool, captured: bool) -> None:
    found = []
    for size in (1, 2):
        with opened(size, one_shot=one_shot) as runner:
            if captured:
                runner.warm_up()
            found.append(said(runner))
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1], one_shot="one_shot" in sys.argv, captured="captured" in sys.argv)
