"""Launching the scoring kernels: one copy in, one copy out, one wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from outrider.kernels.device_stream import mark_reached, to_host
from outrider.kernels.launching import launch_options, num_processors
from outrider.kernels.scoring.cutting import _cut_kernel
from outrider.kernels.scoring.device_functions import RUN_SIZE
from outrider.kernels.scoring.grouping import _group_kernel
from outrider.kernels.scoring.kernel import _answer_kernel, _entropy_kernel
from outrider.kernels.scoring.partials import NUM_FIELDS
from outrider.kernels.scoring.rows import Findings, RowFlags, Rows
from outrider.randomness.streams import GROUP_SIZE

_MARKS_PER_GROUP = GROUP_SIZE // 32
_IDS_AT_ONCE = 128
_FEWEST_GROUPS = 16
_MOST_GROUPS_PER_PART = 16
"""Fewer than the bits of a number: the group kernel has one for each."""
_REGISTERS = 96
"""A thread's, of the group kernel."""
_PROGRAMS_PER_PROCESSOR = 18
"""Programs a multiprocessor, each a warp: 18 of the 20 that its registers allow; the rest is for those that answer
rows."""
_GUMBEL_PROGRAMS_PER_PROCESSOR = 32
"""Programs a multiprocessor for rows with a Gumbel argmax: more than fit at once end one by one, and answers begin
meanwhile."""
_ANSWER_WARPS = 1
"""Warps of an answer, for all rows alike: sums of other warps are in another order."""
_CUT_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class Search:
    """Number of a row's best tokens among which its cuts are searched for."""

    runs: int
    """Runs of 8 neighbouring logits, chosen by the best of each."""
    gathered: int
    """Logits."""
    num_warps: int


NARROW = Search(1024, 2048, 8)
"""Search that suffices for most rows; two rows find room on a processor."""
WIDE = Search(2048, 4096, 16)


@dataclass(frozen=True, slots=True)
class _Partial:
    """Results of the group kernel."""

    groups: torch.Tensor  # [R, G, 4] float32
    tops: torch.Tensor  # [R, 128 G]


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """Kernels under way on the current stream; keeps what they read until they have ended."""

    found: torch.Tensor  # [7 R + M] int32, on the host once `await_done` has returned
    num_rows: int
    await_done: Callable[[], None]
    kept: tuple[torch.Tensor, ...]

    @property
    def on_device(self) -> torch.Tensor:
        """[7 R + M] int32, on the device."""
        return self.kept[-1] if self.kept else self.found

    def findings(self) -> Findings:
        """Wait for the kernels."""
        self.await_done()
        return Findings(self.found.numpy(), self.num_rows)


def launch(logits: torch.Tensor, rows: Rows, *, wide: bool = False) -> TritonLaunch:  # [N, V]
    """Copy the rows' description, start the kernels, start the copy of what they find."""
    described = to_device(rows, logits.device)
    found = launch_kernels(logits, described, rows, wide=wide)
    on_host = to_host(found)
    return TritonLaunch(on_host, len(rows), mark_reached(logits.device), (logits, described, found))


def to_device(rows: Rows, device: torch.device) -> torch.Tensor:
    """Packed rows (``rows.pack``) on their way to the device."""
    words = torch.empty(rows.num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    rows.pack(words.numpy())
    return words.to(device, non_blocking=True)


def launch_kernels(logits: torch.Tensor, described: torch.Tensor, rows: Rows, *, wide: bool = False) -> torch.Tensor:
    """The kernels alone: ``logits`` [N, V] and ``described``, what ``rows.pack`` gave, to words [7 R + M] int32."""
    count, vocab_size = len(rows), logits.shape[-1]
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    device, shared = logits.device, launch_options(logits)
    options = {"FAST": logits.is_cuda, **shared}
    registers = {"maxnreg": _REGISTERS} if logits.is_cuda else {}
    found = torch.empty(rows.num_found, dtype=torch.int32, device=device)
    if not count:
        return found
    groups = torch.empty(count, num_groups, NUM_FIELDS, device=device)
    flags = rows.any()
    has = {"HAS_COUPLED": RowFlags.COUPLED in flags, "HAS_MARKS": RowFlags.EXCLUDES in flags}
    has_cuts, has_entropy = RowFlags.CUTS in flags, RowFlags.ENTROPY in flags
    # What no row needs is not made: any memory of the same type stands for it.
    parts = torch.empty(count, num_groups, device=device) if has_entropy else groups
    num_runs = num_groups * (GROUP_SIZE // RUN_SIZE)
    tops = torch.empty(count, num_runs, dtype=logits.dtype, device=device) if has_cuts else logits
    stride = logits.stride(0)
    per_processor = _GUMBEL_PROGRAMS_PER_PROCESSOR if has["HAS_COUPLED"] else _PROGRAMS_PER_PROCESSOR
    groups_per_part, num_parts = _parts(per_processor * num_processors(device) // count, num_groups)
    _group_kernel[(count, num_parts)](
        logits, described, groups, tops, stride, count, vocab_size, num_groups, groups_per_part,
        HAS_CUTS=has_cuts, PACKED=_is_packed(logits), IDS=_IDS_AT_ONCE, num_warps=1, **has, **options, **registers,
    )  # fmt: skip
    most_groups = max(_FEWEST_GROUPS, triton.next_power_of_2(num_groups))
    if has_entropy:
        _entropy_kernel[(count * num_groups,)](
            logits, described, groups, parts, stride, vocab_size, num_groups, GROUPS=most_groups, num_warps=1, **shared
        )
    if RowFlags.CUTS not in rows.all():
        _answer_kernel[(count, 2 if len(rows.support_ids) else 1)](
            logits, described, groups, parts, found, stride, count, vocab_size, num_groups,
            GROUPS=most_groups, IDS=_IDS_AT_ONCE, num_warps=_ANSWER_WARPS, **has, **options,
        )  # fmt: skip
    if has_cuts:
        _answer_cut_rows(logits, described, _Partial(groups, tops), found, WIDE if wide else NARROW)
    return found


def _answer_cut_rows(
    logits: torch.Tensor, described: torch.Tensor, partial: _Partial, found: torch.Tensor, search: Search
) -> None:
    count, num_groups, _ = partial.groups.shape
    vocab_size, num_runs, num_marks = logits.shape[-1], partial.tops.shape[-1], num_groups * _MARKS_PER_GROUP
    most_groups = max(_FEWEST_GROUPS, triton.next_power_of_2(num_groups))
    words: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    marks, masses = torch.empty(count, num_marks, **words), torch.empty(count, most_groups, **words)
    chosen = torch.empty(count, 2 * search.gathered, **words)
    registers = {"maxnreg": _CUT_REGISTERS} if logits.is_cuda else {}
    _cut_kernel[(count,)](
        logits, described, marks, partial.groups, partial.tops, chosen, masses, found,
        logits.stride(0), count, vocab_size, num_groups, num_marks, TOPS=triton.next_power_of_2(num_runs),
        RUNS=search.runs, GATHERED=search.gathered, GROUPS=most_groups, IDS=_IDS_AT_ONCE,
        BITS=16 if logits.dtype == torch.bfloat16 else 32, FAST=logits.is_cuda,
        num_warps=search.num_warps, **launch_options(logits), **registers,
    )  # fmt: skip


def _is_packed(logits: torch.Tensor) -> bool:
    """True if words of two logits can be loaded."""
    is_even = logits.shape[-1] % 2 == 0 and logits.stride(0) % 2 == 0 and logits.data_ptr() % 4 == 0
    return is_even and logits.dtype == torch.bfloat16


def _parts(wanted: int, num_groups: int) -> tuple[int, int]:
    """Groups of a program, and programs of a row, of which ``wanted`` would be best."""
    groups_per_part = min(_MOST_GROUPS_PER_PART, triton.cdiv(num_groups, max(1, wanted)))
    return groups_per_part, triton.cdiv(num_groups, groups_per_part)
