"""Advance of a draft loop from one step to the next, on the device: every drawn token becomes the next step's input.

Contract: a row that has more than one token left to draw appends the one just drawn: its position is the length of the
context, its slot is looked up in the row's pages, the context grows by it, and so does ``POSITION``, which counts the
tokens of the text: more than those of the context where the sequence lacks the first ones.
Other rows stay where they are and store nothing (slot -1). A row with a ``NEXT_BASE`` draws by it from then on. Every
row has one token less to draw, and the step's number grows by one. The token itself is where the sampler left it.
"""

from __future__ import annotations

from outrider.kernels.draft_advance import reference
from outrider.kernels.draft_advance.reference import LoopState
from outrider.kernels.launching import has_kernels

__all__ = ["LoopState", "advance"]


def advance(state: LoopState, page_size: int) -> None:
    """Advance ``state`` to the next step."""
    if has_kernels(state.step.device):
        from outrider.kernels.draft_advance import kernel  # Triton is slow to import

        kernel.advance(state, page_size)
    else:
        reference.advance(state, page_size)
