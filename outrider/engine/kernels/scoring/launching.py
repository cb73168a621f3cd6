"""Launching the scoring kernels: one copy in, one copy out, one wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from outrider.engine.kernels.launching import launch_options
from outrider.engine.kernels.scoring.cutting import (
    RUN_SIZE,
    _collect_kernel,
    _level_kernel,
    _select_kernel,
    _tops_kernel,
)
from outrider.engine.kernels.scoring.kernel import (
    NUM_REALS,
    _answer_kernel,
    _entropy_kernel,
    _group_kernel,
    _mark_kernel,
)
from outrider.engine.kernels.scoring.rows import Findings, Rows, Wish
from outrider.randomness.streams import GROUP_SIZE

_MARKS_PER_GROUP = GROUP_SIZE // 32
_CLEARED_AT_ONCE = 2048
_IDS_AT_ONCE = 256
_FEWEST_GROUPS = 16
_FEWEST_PARTS = 4096
"""Programs that keep a large device busy; with more than one group each, one is loaded while another is looked at."""
_MOST_GROUPS_PER_PART = 16
_GATHERED = 4096
"""Of the best logits of a row that is cut. Its cuts are searched for among these."""
_REGISTERS = 128
"""A thread's, of the group kernel: sixteen warps find room on a processor."""


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
    num_marks = num_groups * _MARKS_PER_GROUP
    device, options = logits.device, {"FAST": logits.is_cuda, **launch_options(logits)}
    registers = {"maxnreg": _REGISTERS} if logits.is_cuda else {}
    found = torch.empty(rows.num_found, dtype=torch.int32, device=device)
    if not count:
        return found
    groups = torch.empty(NUM_REALS, count, num_groups, device=device)
    unfit = torch.empty(count, num_groups, device=device)
    has_coupled, has_marks = rows.any(Wish.COUPLED), rows.any(Wish.EXCLUDES)
    marks = torch.empty(count, num_marks, dtype=torch.int32, device=device) if has_marks else described
    if has_marks:
        _mark_kernel[(count,)](
            described, marks, count, num_marks, CLEARED=_CLEARED_AT_ONCE, IDS=_IDS_AT_ONCE, **launch_options(logits)
        )
    has_cuts = rows.any(Wish.CUTS)
    cuts = _find_cuts(logits, described, count, num_groups) if has_cuts else described
    stride = logits.stride(0)
    groups_per_part, num_parts = _parts(count, num_groups)
    _group_kernel[(count * num_parts,)](
        logits, described, marks.view(torch.int8), cuts, groups, unfit, stride, count, vocab_size, num_groups,
        num_marks, num_parts, groups_per_part, HAS_COUPLED=has_coupled, HAS_MARKS=has_marks, HAS_CUTS=has_cuts,
        num_warps=1, **options, **registers,
    )  # fmt: skip
    most_groups = max(_FEWEST_GROUPS, triton.next_power_of_2(num_groups))
    if rows.any(Wish.ENTROPY):
        _entropy_kernel[(count * num_groups,)](
            logits, described, cuts, groups, stride, count, vocab_size, num_groups, GROUPS=most_groups,
            HAS_CUTS=has_cuts, num_warps=1, **launch_options(logits),
        )  # fmt: skip
    _answer_kernel[(count,)](
        logits, described, marks, cuts, groups, unfit, found, stride, count, vocab_size, num_groups, num_marks,
        GROUPS=most_groups, IDS=_IDS_AT_ONCE, HAS_COUPLED=has_coupled, HAS_MARKS=has_marks, HAS_CUTS=has_cuts,
        **options,
    )  # fmt: skip
    return found


def _find_cuts(logits: torch.Tensor, described: torch.Tensor, count: int, num_groups: int) -> torch.Tensor:
    """Where min-p, top-k and top-p cut each row: [3, R] int32."""
    device, stride, vocab_size = logits.device, logits.stride(0), logits.shape[-1]
    num_runs = num_groups * (GROUP_SIZE // RUN_SIZE)
    search = {"GATHERED": _GATHERED, "BITS": 16 if logits.dtype == torch.bfloat16 else 32, **launch_options(logits)}
    tops, totals = torch.empty(count, num_runs, device=device), torch.empty(count, num_groups, device=device)
    levels, counts = torch.empty(count, device=device), torch.empty(count, dtype=torch.int32, device=device)
    values = torch.empty(count, _GATHERED, device=device)
    ids = torch.empty(count, _GATHERED, dtype=torch.int32, device=device)
    cuts = torch.empty(3, count, dtype=torch.int32, device=device)
    groups_per_part, num_parts = _parts(count, num_groups)
    _tops_kernel[(count * num_parts,)](
        logits, described, tops, totals, stride, count, vocab_size, num_groups, num_parts, groups_per_part,
        num_warps=1, **launch_options(logits),
    )  # fmt: skip
    _level_kernel[(count,)](
        described, tops, levels, counts, count, num_groups, RUNS=triton.next_power_of_2(num_runs), **search
    )
    _collect_kernel[(count * num_parts,)](
        logits, described, levels, counts, values, ids, stride, count, vocab_size, num_groups, num_parts,
        groups_per_part, GATHERED=_GATHERED, num_warps=1, **launch_options(logits),
    )  # fmt: skip
    _select_kernel[(count,)](
        described, tops, totals, levels, counts, values, ids, cuts, count, num_groups,
        GROUPS=max(_FEWEST_GROUPS, triton.next_power_of_2(num_groups)), ID_BITS=max(1, (vocab_size - 1).bit_length()),
        num_warps=8, **search,
    )  # fmt: skip
    return cuts


def _parts(count: int, num_groups: int) -> tuple[int, int]:
    """How many groups a program has, and how many programs a row."""
    groups_per_part = min(_MOST_GROUPS_PER_PART, triton.cdiv(count * num_groups, _FEWEST_PARTS))
    return groups_per_part, triton.cdiv(num_groups, groups_per_part)
