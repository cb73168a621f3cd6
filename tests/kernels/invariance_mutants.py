"""Seeded mistakes in batch-invariant kernels, each of which the cases that compare bits have to find.

``python -m tests.kernels.invariance_mutants [NAME ...]`` copies the package, makes one mistake in the copy and runs the
cases on it. A mistake is found when a case fails by its own comparison. Needs a GPU; with ``--interpret`` only
mistakes that the interpreter can show are made. Ends with 1 if a mistake is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CASES = "invariance_cases"
_LIMIT_S = 400
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake."""

    file: str
    """File below ``outrider``."""
    changes: Sequence[tuple[str, str]]
    cases: str
    """Expression of pytest's ``-k``: the cases that may find it."""
    is_interpreted: bool = False
    """True if the interpreter shows it."""
    module: str = _CASES
    """Module of the cases."""


_LINEAR, _ATTENTION = "kernels/linear", "kernels/paged_attention"
_JOIN_SPLITS = """        tl.store(sums + split * BLOCK_N * BLOCK_T, total)
        tl.debug_barrier()  # all"""
_PRODUCTS = "same_bits and products"
_WHOLE_ATTENTION = "attention_has_the_same_bits"
MUTANTS: dict[str, Mutant] = {
    "split-follows-rows": Mutant(
        f"{_LINEAR}/invariant.py", [("tiling(len(x)), parts=self._parts)", "tiling(len(x)), parts=1)")], _PRODUCTS,
        is_interpreted=True,
    ),
    "parts-follow-tiles": Mutant(
        f"{_LINEAR}/ordered.py",
        [("(K + PARTS * _PART_COLUMNS - 1) // (PARTS * _PART_COLUMNS) * _PART_COLUMNS",
          "(K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K")],
        _PRODUCTS, is_interpreted=True,
    ),
    "split-k-follows-rows": Mutant(
        f"{_LINEAR}/invariant.py",
        [("selection.split_tiling(len(x), self._parts)", "selection.split_tiling(len(x), 2 if len(x) > 9 else 4)")],
        _PRODUCTS, is_interpreted=True,
    ),
    "atomic-add-of-parts": Mutant(
        f"{_LINEAR}/skinny.py",
        [(_JOIN_SPLITS, _JOIN_SPLITS.replace("tl.store(sums + split * BLOCK_N * BLOCK_T, total)",
                                             "tl.atomic_add(sums + tl.zeros_like(total).to(tl.int32), total)")),
         ("for other in tl.static_range(SPLITS):", "for other in tl.static_range(1):"),
         ("sums = torch.empty(num_sums", "sums = torch.zeros(num_sums")],
        "sums_do_not_depend or (same_bits and products)", is_interpreted=True,
    ),
    "parts-rounded-before-they-meet": Mutant(
        f"{_LINEAR}/split_k.py",
        [("mask=inside, other=0.0)\n    if HAS_BIAS:\n        total += tl.load(bias_ptr + place",
          "mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)\n"
          "    if HAS_BIAS:\n        total += tl.load(bias_ptr + place")],
        _PRODUCTS,
    ),
    "product-begins-with-a-sum": Mutant(
        f"{_LINEAR}/split_k.py", [("return tl.fma(total, 1.0, addend)", "return total + addend")], _PRODUCTS,
    ),
    "segments-follow-the-division": Mutant(
        f"{_ATTENTION}/segments.py",
        [("if (start + BLOCK_N >= high) | (segment != next_segment):", "if start + BLOCK_N >= high:")],
        _WHOLE_ATTENTION, is_interpreted=True,
    ),
    "blocks-follow-the-window": Mutant(
        f"{_ATTENTION}/segments.py",
        [("tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N",
          "tl.maximum(first_position - window + 1, 0)")],
        _WHOLE_ATTENTION, is_interpreted=True,
    ),
    "weights-added-by-layout": Mutant(
        f"{_ATTENTION}/segments.py",
        [("own_sum * fade + _sum_weights(weights)", "own_sum * fade + tl.sum(weights, 1)")],
        f"{_WHOLE_ATTENTION} and 128-None-None-0-False",
    ),
    "columns-follow-the-cache": Mutant(
        f"{_ATTENTION}/segments.py", [("if IS_COMPILED and numbers", "if False and numbers")],
        f"{_WHOLE_ATTENTION} and 128-cached",
    ),
    "segments-joined-backwards": Mutant(
        f"{_ATTENTION}/invariant.py",
        [("slot = first + step\n", "slot = num_segments - 1 - first - step\n"),
         ("is_there = slot < num_segments", "is_there = slot >= 0\n            slot = tl.maximum(slot, 0)")],
        _WHOLE_ATTENTION, is_interpreted=True,
    ),
    "segments-joined-by-arrival": Mutant(
        f"{_ATTENTION}/invariant.py",
        [("end_segment - first_segment,\n", "end_segment - first_segment, begin,\n"),
         ("num_segments, first_query", "num_segments, last, first_query"),
         ("slot = first + step\n            is_there = slot < num_segments",
          "is_there = first + step < num_segments\n            slot = (first + step + last) % num_segments")],
        "sums_do_not_depend", is_interpreted=True,
    ),
    "model-with-library-products": Mutant(
        "model_executor/layers/linear_methods.py",
        [("self._batch_invariant, self._num_experts = spec.batch_invariant",
          "self._batch_invariant, self._num_experts = False")],
        "logits_of_a_model and llama", is_interpreted=True,
    ),
    "states-in-chunks": Mutant(
        "model_executor/layers/gated_delta_net.py", [("in_chunks=not self._batch_invariant and", "in_chunks=")],
        "logits_of_a_model and qwen3_5",
    ),
    "fp8-scale-follows-place": Mutant(
        "kernels/fp8_linear/kernel.py",
        [("total *= tl.load(x_scales_ptr + t, mask=is_token, other=0.0)[None, :]",
          "total *= (tl.load(x_scales_ptr + t, mask=is_token, other=0.0) * (1 + t % 2 * 0.01))[None, :]")],
        "a_row_is_the_same", is_interpreted=True, module="fp8_cases",
    ),
    "fp8-split-follows-rows": Mutant(
        "kernels/fp8_linear/weight.py",
        [("bias, splits=self.splits, tiling", "bias, splits=self.splits if num_tokens > 9 else 1, tiling")],
        "a_row_is_the_same", is_interpreted=True, module="fp8_cases",
    ),
    "noise-follows-the-row": Mutant(
        "kernels/scoring/device_functions.py", [("word(rows_ptr, _POSITION, row)\n", "row\n")],
        "answers_depend_on_no_neighbour", is_interpreted=True, module="scoring_cases",
    ),
}  # fmt: skip


def run(name: str, *, interpret: bool) -> tuple[bool, str]:
    """True if the cases find the mistake, and their last lines."""
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for entry in ROOT.iterdir():
            if entry.name != "outrider" and not entry.name.startswith("."):
                folder.joinpath(entry.name).symlink_to(entry)
        shutil.copytree(ROOT / "outrider", folder / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
        _change(folder / "outrider" / mutant.file, mutant.changes)
        options = ("-q", "-x", "-p", "no:cacheprovider", "--tb=line", "-k", mutant.cases)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", f"tests/kernels/{mutant.module}.py", *options],
            cwd=folder, env=_environment(folder, interpret=interpret), capture_output=True, text=True, check=False,
            timeout=_LIMIT_S,
        )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if "assert" in line.lower()]
    return done.returncode == 1 and bool(told), " / ".join(told)[:200] or (done.stdout + done.stderr)[-300:]


def _environment(folder: Path, *, interpret: bool) -> dict[str, str]:
    """Variables with which the copy is imported, and not this tree."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = [folder, folder / "draft_service", folder / "target_service", folder / "coordinator"]
    search = [*map(str, own), *(path for path in others if not Path(path).is_relative_to(ROOT))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), "TRITON_INTERPRET": str(int(interpret))}


def _change(file: Path, changes: Sequence[tuple[str, str]]) -> None:
    text = file.read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{file.name} has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    file.write_text(text)


def main() -> int:
    """Make the mistakes and print whether each was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"Of {', '.join(MUTANTS)}.")
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    names = options.names or [name for name, one in MUTANTS.items() if one.is_interpreted or not options.interpret]
    with ThreadPoolExecutor(1 if options.interpret else _AT_ONCE) as pool:
        outcomes = list(pool.map(lambda name: _told(name, interpret=options.interpret), names))
    return int(not all(outcomes))


def _told(name: str, *, interpret: bool) -> bool:
    is_found, told = run(name, interpret=interpret)
    sys.stdout.write(f"{name}: {'found' if is_found else 'NOT FOUND'}: {told}\n")
    sys.stdout.flush()
    return is_found


if __name__ == "__main__":
    sys.exit(main())
