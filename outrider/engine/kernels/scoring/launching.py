"""Launching the scoring kernels: one copy in, one copy out, one wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from outrider.engine.kernels.launching import launch_options
from outrider.engine.kernels.scoring.cutting import _cut_kernel
from outrider.engine.kernels.scoring.device_functions import RUN_SIZE
from outrider.engine.kernels.scoring.kernel import (
    NUM_REALS,
    _answer_kernel,
    _entropy_kernel,
    _group_kernel,
)
from outrider.engine.kernels.scoring.rows import Findings, Rows, Wish
from outrider.randomness.streams import GROUP_SIZE

_MARKS_PER_GROUP = GROUP_SIZE // 32
_IDS_AT_ONCE = 128
_FEWEST_GROUPS = 16
_FEWEST_PARTS = 8192
"""Programs that keep a large device busy; with more than one group each, one is loaded while another is looked at."""
_MOST_GROUPS_PER_PART = 16
_CHOSEN_RUNS = 2048
_GATHERED = 4096
"""Of the best logits of a row that is cut. Its cuts are searched for among these."""
_CUT_WARPS = 16
_REGISTERS = 96
"""A thread's, of the group kernel: twenty warps find room on a processor."""


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """Kernels under way on the current stream; keeps what they read until they have ended."""

    found: torch.Tensor  # [7 R + M] int32, on the host once `done`
    num_rows: int
    done: torch.cuda.Event | None
    kept: tuple[torch.Tensor, ...]

    def findings(self) -> Findings:
        """Wait for the kernels."""
        if self.done is not None:
            self.done.synchronize()
        return Findings(self.found.numpy(), self.num_rows)


@torch.inference_mode()
def launch(logits: torch.Tensor, rows: Rows) -> TritonLaunch:  # [N, V]
    """Copy the rows' description, start the kernels, start the copy of what they find."""
    described = to_device(rows, logits.device)
    found = launch_kernels(logits, described, rows)
    if not logits.is_cuda:
        return TritonLaunch(found, len(rows), None, ())
    on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    on_host.copy_(found, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(logits.device))
    return TritonLaunch(on_host, len(rows), done, (logits, described, found))


def to_device(rows: Rows, device: torch.device) -> torch.Tensor:
    """What ``rows.pack`` gives, on its way to the device."""
    words = torch.empty(rows.num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    rows.pack(words.numpy())
    return words.to(device, non_blocking=True)


def launch_kernels(logits: torch.Tensor, described: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The kernels alone: ``logits`` [N, V] and ``described``, what ``rows.pack`` gave, to words [7 R + M] int32."""
    count, vocab_size = len(rows), logits.shape[-1]
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    device, shared = logits.device, launch_options(logits)
    options = {"FAST": logits.is_cuda, **shared}
    registers = {"maxnreg": _REGISTERS} if logits.is_cuda else {}
    found = torch.empty(rows.num_found, dtype=torch.int32, device=device)
    if not count:
        return found
    groups = torch.empty(NUM_REALS, count, num_groups, device=device)
    unfit = torch.empty(count, num_groups, device=device)
    has = {"HAS_COUPLED": rows.any(Wish.COUPLED), "HAS_MARKS": rows.any(Wish.EXCLUDES)}
    has_cuts = rows.any(Wish.CUTS)
    num_runs = num_groups * (GROUP_SIZE // RUN_SIZE)
    tops = torch.empty(count, num_runs if has_cuts else 0, dtype=logits.dtype, device=device)
    stride = logits.stride(0)
    groups_per_part, num_parts = _parts(count, num_groups)
    _group_kernel[(count * num_parts,)](
        logits, described, groups, unfit, tops, stride, count, vocab_size, num_groups, num_parts,
        groups_per_part, HAS_CUTS=has_cuts, IDS=_IDS_AT_ONCE, num_warps=1, **has, **options, **registers,
    )  # fmt: skip
    most_groups = max(_FEWEST_GROUPS, triton.next_power_of_2(num_groups))
    if rows.any(Wish.ENTROPY):
        _entropy_kernel[(count * num_groups,)](
            logits, described, groups, stride, count, vocab_size, num_groups, GROUPS=most_groups, num_warps=1, **shared
        )
    if not rows.all(Wish.CUTS):
        _answer_kernel[(count, 2 if len(rows.support_ids) else 1)](
            logits, described, groups, unfit, found, stride, count, vocab_size, num_groups,
            GROUPS=most_groups, IDS=_IDS_AT_ONCE, **has, **options,
        )  # fmt: skip
    if has_cuts:
        num_marks = num_groups * _MARKS_PER_GROUP
        marks = torch.empty(count, num_marks, dtype=torch.int32, device=device)
        chosen = torch.empty(count, 2 * _GATHERED, dtype=torch.int32, device=device)
        masses = torch.empty(count, most_groups, dtype=torch.int32, device=device)
        _cut_kernel[(count,)](
            logits, described, marks, groups, unfit, tops, chosen, masses, found, stride, count, vocab_size,
            num_groups, num_marks, TOPS=triton.next_power_of_2(num_runs), RUNS=_CHOSEN_RUNS, GATHERED=_GATHERED,
            GROUPS=most_groups, IDS=_IDS_AT_ONCE, BITS=16 if logits.dtype == torch.bfloat16 else 32,
            num_warps=_CUT_WARPS, **options,
        )  # fmt: skip
    return found


def _parts(count: int, num_groups: int) -> tuple[int, int]:
    """How many groups a program has, and how many programs a row."""
    groups_per_part = min(_MOST_GROUPS_PER_PART, triton.cdiv(count * num_groups, _FEWEST_PARTS))
    return groups_per_part, triton.cdiv(num_groups, groups_per_part)
