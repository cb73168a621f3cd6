"""Gumbel-max sampling: the drawn token is the argmax of log weight plus Gumbel noise.

The drawn token follows the weights exactly, normalised or not. The noise of a token depends only on the request's
seed, the stream, the position and the token.

Source: Maddison et al., "A* Sampling" (2014).

Shape letters: ``N`` rows, ``V`` vocabulary, ``S`` tokens of a support.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.randomness.philox_torch import StreamRows, row_gumbel, token_gumbel
from outrider.randomness.streams import GROUP_SIZE, LANES, Stream
from outrider.sampling.rows import LogitRow


def stream_rows(rows: Sequence[LogitRow], stream: Stream, device: torch.device) -> StreamRows:
    """Positions of the rows' noise in a random stream. Coupled noise is independent of the base."""
    bases = [0 if stream is Stream.COUPLED else row.base for row in rows]
    return StreamRows.of([row.open.seed for row in rows], stream, bases, [row.length for row in rows], device)


def gumbel_argmax(log_weights: Tensor, noise: StreamRows) -> Tensor:  # [N, V] float32 -> [N] int64
    """Gumbel argmax over all tokens; the lowest id wins ties."""
    return row_gumbel(noise, log_weights.shape[-1]).add_(log_weights).argmax(-1)


def gumbel_argmax_by_groups(log_weights: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N] int64
    """Draw in two stages: a group of neighbouring ids by its total weight, then a token of that group.

    The distribution is that of ``gumbel_argmax`` over all tokens, with less noise to compute. A row without weight
    gives any id.
    """
    device = log_weights.device
    return grouped_argmax(
        log_weights, stream_rows(rows, Stream.OUTSIDE, device), stream_rows(rows, Stream.OUTSIDE_GROUP, device)
    )


def grouped_argmax(log_weights: Tensor, noise: StreamRows, group_noise: StreamRows) -> Tensor:  # [N, V] -> [N] int64
    """``gumbel_argmax_by_groups`` with the noise of the tokens and of their groups."""
    if log_weights.shape[-1] <= GROUP_SIZE:
        return gumbel_argmax(log_weights, noise)
    padding = -log_weights.shape[-1] % GROUP_SIZE
    padded = F.pad(log_weights, (0, padding), value=float("-inf"))
    groups = padded.view(len(padded), -1, GROUP_SIZE)  # [N, G, 1024]
    chosen = gumbel_argmax(groups.logsumexp(-1), group_noise)  # [N]
    inside = groups[torch.arange(len(chosen), device=chosen.device), chosen]  # [N, 1024]
    ids = chosen.unsqueeze(-1) * GROUP_SIZE + torch.arange(GROUP_SIZE, device=chosen.device)
    return gumbel_argmax_among(inside, ids, noise, log_weights.shape[-1] + padding)


def gumbel_argmax_among(
    log_weights: Tensor,  # [N, S] float32, -inf where a row has fewer
    token_ids: Tensor,  # [N, S] int64
    noise: StreamRows,
    vocab_size: int,
) -> Tensor:  # [N] int64
    """Gumbel argmax among the given tokens; equals ``gumbel_argmax`` with all other tokens at -inf."""
    times = _noise_of(token_ids, noise, vocab_size).add_(log_weights)
    best = times.amax(-1, keepdim=True)
    return token_ids.masked_fill(times < best, vocab_size).amin(-1)


def _noise_of(token_ids: Tensor, noise: StreamRows, vocab_size: int) -> Tensor:  # [N, S] float32
    """Noise of the given tokens. A generator block gives four ids, so wide supports compute whole rows."""
    if token_ids.shape[-1] * LANES >= vocab_size:
        return row_gumbel(noise, vocab_size).gather(-1, token_ids)
    return token_gumbel(noise, token_ids)
