"""Scoring of many rows of logits in one pass: tokens, probabilities and masses.

Contract: ``launch(logits, rows)`` takes ``logits [N, V]`` of any floating type and ``Rows``, R descriptions of which
each names a row of the logits; it starts the work and gives a ``Launch`` whose ``findings()`` waits for the answer. A
row's distribution is softmax over ids below its limit of logits / temperature; logits past the limit are not looked
at. Where ``CUTS``, it is what min-p, top-k and top-p leave of that, in this order, as ``truncation.py`` defines them; a
token that probabilities put on the edge may fall to either side if rounding of 1e-6 decides. What is found of each row,
``Found``:

* ``STATUS``: whether a logit is NaN or infinite, and whether the row's cuts could not be found, because more stays than
  was looked at; all else means nothing then. Where ``wide``, more is looked at. ``LARGEST``: the largest logit.
* ``ARGMAX``, where neither ``COUPLED`` nor ``DRAWS``: the likeliest token, lowest id of equals.
* ``GUMBEL_ARGMAX``, where ``COUPLED``: the Gumbel argmax with the noise of stream ``COUPLED``, base 0.
* ``MASS``, where ``DRAWS``: of all ids, less those of the support where ``EXCLUDES``; summed directly, never as one
  minus the rest. What is under float32's smallest normal number, relative to the likeliest token, is 0.
* ``OUTSIDE``, where ``DRAWS``: a token drawn from that mass by ``gumbel_argmax_by_groups``, -1 where it is 0.
* ``ENTROPY``, where asked for: nats, with ln(p + 1e-5).
* ``support_probs``: of every id of every support, one row after the other; ids of a row need not be distinct.

The truth is ``outrider/sampling`` (``process.py``, ``forms.py``) on the CPU. Uniforms are bit-equal. Scores of a Gumbel
argmax differ from the reference's in the last places, so the winner may where the best two are within about 1e-5.
A probability p agrees within (1 + |ln p|) / 2,000,000 of its size. Temperatures below 1e-7 count as 1e-7. Nothing
depends on a row's place, its neighbours or how many there are.
"""

from __future__ import annotations

from torch import Tensor

from outrider.kernels.scoring.rows import (
    NO_IDS,
    Findings,
    Found,
    Launch,
    RowFlags,
    Rows,
    ScoringColumn,
    Words,
    ask,
    every_kind,
    place,
)

__all__ = [
    "NO_IDS",
    "ScoringColumn",
    "Findings",
    "Found",
    "Launch",
    "Rows",
    "RowFlags",
    "Words",
    "ask",
    "launch",
    "place",
    "warm_up",
]


def launch(logits: Tensor, rows: Rows, *, wide: bool = False) -> Launch:  # [N, V]
    """Start the work on the logits' device and return at once."""
    from outrider.kernels.scoring import launching  # Triton is slow to import

    return launching.launch(logits, rows, wide=wide)


def warm_up(logits: Tensor) -> None:  # [N, V]
    """Compile the kernels for rows of logits like these."""
    for rows in every_kind():
        launch(logits, rows).findings()
        if RowFlags.CUTS in rows.any():
            launch(logits, rows, wide=True).findings()
