"""Forwards of a model of transformers in the shapes of CUDA graphs, compared with the reference; see
``test_fallback``. Run as a module where Triton interprets.
"""

from __future__ import annotations

import sys

import torch

from outrider.model_executor.graph_shapes import GraphLimits
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import forward_and_check, open_scripted, random_ids
from tests.support.fallback_models import build_fallback
from tests.support.quick_interpreter import set_up_quick_interpreter


def main(name: str) -> None:
    """Prefill without a graph, then decoding and scoring of one and two sequences with graphs."""
    set_up_quick_interpreter()
    torch.set_num_threads(1)
    folder, text = build_fallback(name), random_ids(60, seed=1)
    limits = GraphLimits(max_sequences=3, max_draft_length=3, max_tokens=16)
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=40, graphs=limits)
    runner.capture()
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    first, second = (open_scripted(runner, folder, 60) for _ in range(2))
    forward_and_check(runner, (first, text[:9], None))
    used = []
    for start, size, other in ((9, 1, 1), (10, 4, 3), (14, 1, 1), (15, 3, 2)):
        rows = (first, text[start : start + size], None), (second, text[start : start + other], None)
        forward_and_check(runner, *rows)
        used.append(runner.worker.used_graph)
    if not all(used):
        raise SystemExit(f"without graphs: {used}")


if __name__ == "__main__":
    main(sys.argv[1])
