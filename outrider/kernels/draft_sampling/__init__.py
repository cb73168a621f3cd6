"""Drawing the tokens of one draft step, from logits on the device to the next step's input on the device.

Contract: ``logits [B, V]``, of any floating type, are those of one step of every row; ``parameters [B, NUM_COLUMNS]``
say how each row draws (``layout.RowParameters``); rows with no tokens left to draw draw nothing. Logits count as
float32, divided by the row's temperature, with the tokens the row never draws at minus infinity. Greedy takes the
largest; coupled adds the shared noise of the row's position first; sparse draws by Gumbel argmax among the smallest set
of likeliest tokens with at least ``mass``, ``limit`` of them at most, scaled to 1, and reports that set. Of equals the
lowest id goes first, in every choice. Grouped guesses the bonus token of a target: it draws as ``sampling.draws`` does
by groups, from the draft's own logits and uncut, and what follows is drawn by sparse (``Column.NEXT_BASE``). A row with
logits that are not finite, or with nothing to draw, draws -1 and hurts no other.

Min-p, top-k and top-p cut a row first, in this order and as ``logits_processors.truncation`` of ``outrider.sampling``
does, as far as the ``limit`` likeliest tokens go: a set that would reach further ends there, and the mass of what
min-p and top-k leave counts as all of it where they cut beyond. What a target cuts off decides what is emitted; what a
draft cuts off decides only what it proposes. Cut coupled rows draw among what is left, ``limit`` tokens at most.

Promised of sparse: what is reported is what was drawn from, bit for bit (the argmax is over the logarithms of the
float32 numbers that are reported). The set is the reference's but where float32 decides: probabilities are within 4
units in the last place of exact ones and their sum within 1e-6 of 1, so tokens whose probabilities are that close may
change places, at the edge of the set too, and a token may be in or out where the mass before it is that close to
``mass``. Tokens of a probability under 2**-126 are left out.

Of rows that take an argmax over all tokens (greedy, coupled) a record names runners-up too: the tokens that would have
been drawn without the ones before them. They are hints: an implementation may leave out some, and names none of other
rows.

A ``DraftSampler`` writes to a ``DraftSink``; nothing comes back to the host.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kernels.draft_sampling.layout import DraftSink
from outrider.kernels.draft_sampling.reference import ReferenceSampler
from outrider.kernels.launching import has_kernels

__all__ = ["DraftSampler", "DraftSink", "make_sampler"]


class DraftSampler(Protocol):
    """Draws with one ``mass`` and one ``limit``."""

    def __call__(self, logits: torch.Tensor, parameters: torch.Tensor, sink: DraftSink) -> None:
        """Draw one step from ``logits`` [B, V] by ``parameters`` [B, NUM_COLUMNS] int32."""
        ...


def make_sampler(device: torch.device, *, mass: float, limit: int) -> DraftSampler:
    """Return the fastest implementation for this device."""
    if has_kernels(device):
        from outrider.kernels.draft_sampling.kernel import TritonSampler  # Triton is slow to import

        return TritonSampler(mass=mass, limit=limit)
    return ReferenceSampler(mass=mass, limit=limit)
