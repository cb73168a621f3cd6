"""The contract of every random number in Outrider.

A number is a pure function of what it is for: no state, no order of drawing, no place in a batch. The function is
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with

::

    key     = (seed & 0xFFFFFFFF, seed >> 32)
    counter = (token >> 2, position, base, stream)
    bits    = output[token & 3]

* ``seed``: the request's, 0 to 2**64 - 1.
* ``stream``: what the number decides; streams are independent of each other.
* ``base``: how many tokens were committed when the proposal was made, for the streams of rejection and typical; 0 for
  ``COUPLED``, whose noise must not know how the text was cut into steps.
* ``position``: absolute position of the token that is decided.
* ``token``: the token the noise belongs to; 0 where one number decides a position.

``uniform`` is ``bits * 2**-32``, in [0, 1). ``gumbel`` is ``-log(E)`` with ``E = -log1p(-min(u, 1 - 2**-24))`` and
``u = (float32(bits) + 0.5) * 2**-32``, all in float32: winners of a Gumbel race have a small E, so a small u, where
float32 is fine. ``-log(-log(u))`` puts them next to u = 1, where its grid is coarse and the largest noise repeats.

Knows no array library. Says nothing of how a number is used.
"""

from __future__ import annotations

import enum


class Stream(enum.IntEnum):
    """Purpose of a random number."""

    PROPOSAL = 1
    """Token that the draft draws."""
    ACCEPTANCE = 2
    """True if a draft token is kept."""
    RESIDUAL = 3
    """Token that takes the place of a rejected one."""
    OUTSIDE = 4
    """Token that the target draws outside the support; with an empty support, the bonus."""
    COUPLED = 5
    """The noise that draft and target share."""
    OUTSIDE_GROUP = 6
    """Group of ``GROUP_SIZE`` neighbouring tokens that holds the token of ``OUTSIDE``; ``token`` is the group's number.
    """


ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
LANES = 4
GROUP_SIZE = 1024
"""Neighbouring tokens that the draw outside the support takes together. A race in two stages, first of the groups with
their masses, then of the tokens of the group that won, follows the same distribution as one race of all tokens, and
needs the noise of one group instead of that of the whole vocabulary.
"""
UNIT = 2.0**-32
"""Factor that maps a 32-bit number to [0, 1)."""
LARGEST_UNIT = 1.0 - 2.0**-24
"""The float32 below 1: ``u`` is kept at or under it so that E is finite."""


def split_seed(seed: int) -> tuple[int, int]:
    """The Philox key of a seed: its low and high 32 bits."""
    return seed & MASK, (seed >> 32) & MASK
