"""State rows: the target's states of a step's pairs, where they were fetched to, on their way to what a loop reads.

Shape letters: ``N`` pairs, ``F`` values of a position's states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadStateRows:
    """States [N, F] of pairs, in order: those of ``parts`` one after the other, or some rows of a single part."""

    parts: Sequence[torch.Tensor]  # [n, F] each, of one type and device
    indices: torch.Tensor | None = None  # [N] int32 on the device
    """Row of the one part for each pair; None: all rows in their order."""

    def copy_to(self, out: torch.Tensor, first: int) -> None:
        """Queue one copy of the rows from number ``first`` on to ``out`` [n, F], which is of their type."""
        last = first + len(out)
        if self.indices is not None:
            torch.index_select(self.parts[0], 0, self.indices[first:last], out=out)
            return
        wanted = list(self._between(first, last))
        if len(wanted) == 1:
            out.copy_(wanted[0], non_blocking=True)
        elif wanted:
            torch.cat(wanted, out=out)

    def _between(self, first: int, last: int) -> Iterator[torch.Tensor]:
        begin = 0
        for part in self.parts:
            end = begin + len(part)
            if begin < last and end > first:
                yield part[max(0, first - begin) : last - begin]
            begin = end
