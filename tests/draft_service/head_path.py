"""EAGLE-3 and DFlash between a target and a session loop, all on one device; writes what was drafted and said to a
file.

Run as a module, by ``test_head_path.py``: on a CPU as it is, on a CPU where Triton interprets, so that draft loops and
captured forwards run but for the capture of graphs, and on a GPU. Each must give the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from outrider.config import DraftSettings, load
from outrider.kernels.launching import has_kernels
from outrider.model_executor.draft_heads.block_runner import BlockRunner
from outrider.model_executor.graph_shapes import GraphLimits
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Proposal
from outrider.types import SparseEvidence
from outrider_draft.proposers.head_executor import HeadExecutor
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.model_executor.parity import random_ids
from tests.support.dflash import build_dflash
from tests.support.eagle3 import LAYERS, build_eagle3
from tests.support.quick_interpreter import set_up_quick_interpreter
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model

LENGTH = 48
SMALL = bool(os.environ.get("SMALL"))
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "acceptance_method": "coupled"},
    {"temperature": 0.8, "acceptance_method": "rejection", "min_tokens": 2},
]
WINDOWS: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
LIMITS = GraphLimits(max_sequences=4, max_draft_length=4, max_tokens=48)


def requests() -> list[dict[str, Any]]:
    """Prompts of several chunks and of one token; few and short ones for the interpreter, which is slow."""
    lengths, count = ((6, 3, 1), 5) if SMALL else ((30, 12, 9, 1), 12)
    return [
        {
            "prompt_token_ids": tuple(token % 256 for token in random_ids(length, 40 + i)),
            "max_tokens": count, "ignore_eos": True, "seed": 7 + i, **SAMPLING[i % len(SAMPLING)],
        }
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def play(device: str, method: str, head: Path) -> dict[str, Any]:
    """Drafts, the distributions that they were drawn from, and the target's answers."""
    target = cached_tiny_model("llama", seed=1)
    argv = ["--method", method, "--model", str(head), "--target-model", str(target)]
    sizes = ["--device", device, "--page-size", "4", "--num-pages", "200", "--max-model-len", str(LENGTH)]
    limits = ["--max-running-requests", "4", "--num-speculative-tokens", "4", "--dtype", "float32"]
    draft = load_proposer(load(DraftSettings, [*argv, *sizes, *limits], {}), LoadHooks())
    assert isinstance(draft.executor, HeadExecutor)
    runner = draft.executor.runner
    on_kernels = has_kernels(torch.device(device))
    if not isinstance(runner, BlockRunner):
        assert bool(runner.max_prefill) == on_kernels
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))  # a stale read would show
    on_device = {"device": device, "dtype": "float32", "graphs": LIMITS, "page_size": 4}
    rig = ServiceRig(
        target, draft, max_model_len=LENGTH, num_speculative_tokens=4, target_forward=24, draft_forward=10,
        target_options=on_device,
    )  # fmt: skip
    found: dict[str, Any] = {"drafted": [], "ids": [], "probs": []}

    def watch(event: Any) -> Any:
        if isinstance(event, Proposal):
            drafts.append(event)
        return event

    drafts: list[Proposal] = []
    rig.change_draft_event = watch
    found["said"] = rig.generate(requests())
    # Who is answered first is a matter of how drafts are drawn.
    for one in sorted(drafts, key=lambda draft: (draft.session, draft.base_length, len(draft.token_ids))):
        found["drafted"].append([one.session, one.base_length, *one.token_ids])
        if isinstance(one.evidence, SparseEvidence):
            order = one.evidence.token_ids.argsort(kind="stable")
            found["ids"].append(one.evidence.token_ids[order].tolist())
            found["probs"].append(one.evidence.probs[order].tolist())
    runner.sequences.check_integrity()
    if isinstance(runner, BlockRunner):
        assert bool(runner.num_replays) == on_kernels
    return found


def forward_states(device: str) -> list[list[float]]:
    """States of prompts, of chunks beside scored rows, and of other layers than those first asked for."""
    runner = ModelRunner.load(
        cached_tiny_model("llama", seed=1), device=device, dtype="float32", page_size=4, num_pages=64, graphs=LIMITS
    )
    runner.capture()
    first, second = runner.sequences.open(40), runner.sequences.open(40)
    found: list[list[float]] = []
    for rows, layers in (
        ([ForwardRow(first, list(range(3, 20)), 1)], LAYERS),
        ([ForwardRow(first, [7, 8, 9, 10, 11], 5), ForwardRow(second, list(range(9)), 1)], LAYERS),
        ([ForwardRow(second, [33], 1)], [2, -1]),
        ([ForwardRow(second, [34], 1)], [0]),
    ):
        count = sum(len(row.token_ids) for row in rows)
        logits, states = runner.forward_batch(RowBatch.of(rows), layers)
        assert states.shape == (count, 32 * len(layers))
        found += [*states.flatten(1).tolist(), *logits.tolist()]
    found += runner.forward([ForwardRow(first, [1], 1)]).tolist()
    return found


def main(device: str, path: Path) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        set_up_quick_interpreter()
    folder = path.with_suffix(".heads")
    found = {
        "reduced": play(device, "eagle3", build_eagle3(folder / "reduced", draft_vocab_size=97)),
        "blocks": play(device, "dflash", build_dflash(folder / "blocks", **WINDOWS)),
        "states": forward_states(device),
    }
    if not SMALL:
        layout: dict[str, Any] = {"speculators": True, "norm_before_residual": True, "draft_vocab_size": 272}
        found["whole"] = play(device, "eagle3", build_eagle3(folder / "whole", **layout))
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
