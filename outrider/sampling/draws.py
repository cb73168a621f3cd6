"""Drawing by Gumbel race: the token whose log weight plus noise is largest.

The winner follows the weights exactly, normalised or not, and a token's noise depends on nothing but the request's
seed, the stream, the position and the token. Knows no sampling parameter.

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
    """Where each row's noise stands in the stream; coupled noise does not know the base."""
    bases = [0 if stream is Stream.COUPLED else row.base for row in rows]
    return StreamRows.of([row.open.seed for row in rows], stream, bases, [row.length for row in rows], device)


def race(log_weights: Tensor, noise: StreamRows) -> Tensor:  # [N, V] float32 -> [N] int64
    """The winners among all tokens; lowest id of equals."""
    return row_gumbel(noise, log_weights.shape[-1]).add_(log_weights).argmax(-1)


def race_by_groups(log_weights: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N] int64
    """The draw outside the support: a race of groups of neighbouring tokens by their sums, then one inside the winner.

    The law of one race of all tokens for the noise of one group. A row without weight gives any id.
    """
    noise = stream_rows(rows, Stream.OUTSIDE, log_weights.device)
    if log_weights.shape[-1] <= GROUP_SIZE:
        return race(log_weights, noise)
    padding = -log_weights.shape[-1] % GROUP_SIZE
    groups = F.pad(log_weights, (0, padding), value=float("-inf")).view(len(rows), -1, GROUP_SIZE)  # [N, G, 1024]
    chosen = race(groups.logsumexp(-1), stream_rows(rows, Stream.OUTSIDE_GROUP, log_weights.device))  # [N]
    inside = groups[torch.arange(len(rows), device=chosen.device), chosen]  # [N, 1024]
    ids = chosen.unsqueeze(-1) * GROUP_SIZE + torch.arange(GROUP_SIZE, device=chosen.device)
    return race_among(inside, ids, noise, log_weights.shape[-1] + padding)


def race_among(
    log_weights: Tensor,  # [N, S] float32, -inf where a row has fewer
    token_ids: Tensor,  # [N, S] int64
    noise: StreamRows,
    vocab_size: int,
) -> Tensor:  # [N] int64
    """The winners among the given tokens; lowest id of equals. The same as ``race`` with the others at -inf."""
    times = _noise_of(token_ids, noise, vocab_size).add_(log_weights)
    best = times.amax(-1, keepdim=True)
    return token_ids.masked_fill(times < best, vocab_size).amin(-1)


def _noise_of(token_ids: Tensor, noise: StreamRows, vocab_size: int) -> Tensor:  # [N, S] float32
    """A block of the generator serves four neighbours: for a wide support whole rows are less work."""
    if token_ids.shape[-1] * LANES >= vocab_size:
        return row_gumbel(noise, vocab_size).gather(-1, token_ids)
    return token_gumbel(noise, token_ids)
