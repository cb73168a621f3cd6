"""Products of one or two tokens together with what lies around them, for GPUs: five launches a layer instead of nine.

Contract, T tokens (used up to ``MAX_TOKENS``), weights ``[N, K]`` of 16-bit numbers (used where it ``suits``):

* ``product``: ``x [T, K]`` by a weight, plus a bias.
* ``gated``: adds ``delta`` to ``hidden``, both ``[T, K]``, normalises the sum, multiplies it by a fused gate-and-up
  weight ``[2 N, K]`` and gives ``silu(gate) * up``.
* ``qkv_with_rope``: the same addition and normalisation, then the fused query-key-value product; queries and keys are
  rotated, keys and values go to their slots, as ``apply_rope_and_cache`` has it (without its normalisation of heads).

The last two return the sum of ``hidden`` and ``delta`` first, in memory of its own: their programs all read the two.
What is kept between the parts is not rounded to the weights' type, as it is when they are launched one by one.
"""

from __future__ import annotations

from outrider.kernels.gemv.layout import MAX_TOKENS, Matrix, NormedInput, suits

__all__ = ["MAX_TOKENS", "Matrix", "NormedInput", "suits"]
