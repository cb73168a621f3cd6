"""Communicator of the ranks that share a model: all-reduce and all-gather in the middle of a forward.

The contract, and its form for a single rank; ``device_communicators`` has those between processes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.model_executor.distributed.sharding import Shard


class Norm(Protocol):
    """The normalisation that follows a sum."""

    @property
    def weight(self) -> torch.Tensor:
        """[N]."""
        ...

    @property
    def eps(self) -> float:
        """Added to the mean square."""
        ...

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` to ``x`` in place and normalise the sum."""
        ...


class Communicator(Protocol):
    """Called by all ranks in the same order, with tensors of the same shapes and type."""

    @property
    def shard(self) -> Shard:
        """The place of the one that calls."""
        ...

    def in_rank_order(self) -> Communicator:
        """Communicator of the same ranks whose sums have an order that does not follow the number of rows."""
        ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``part``, the same bits on each; ``part`` may be written over."""
        ...

    def add_and_norm(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum of every rank's ``part`` [T, N] to ``hidden`` [T, N] in place, and normalise that."""
        ...

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's ``part`` [N, C] beside each other, in the order of ranks: [N, size * C]."""
        ...


class SingleRank:
    """The only rank there is."""

    shard = Shard()

    def in_rank_order(self) -> SingleRank:
        """Itself: there is no sum."""
        return self

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The one part itself."""
        return part

    def add_and_norm(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalised sum of the residual and the one part."""
        return norm.after_adding(hidden, part)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The one part itself."""
        return part


SINGLE_RANK = SingleRank()


def gather_by_sum(communicator: Communicator, part: torch.Tensor) -> torch.Tensor:
    """``all_gather`` as a sum of parts [N, C] between zeros: [N, size * C].

    CUDA graphs of several ranks have no other collective than sums (``all_reduce``), and small ones are one-shot.
    """
    size = communicator.shard.size
    if size == 1:
        return part
    num_rows, width = part.shape
    parts = part.new_zeros(num_rows, size, width)
    parts[:, communicator.shard.rank].copy_(part)
    return communicator.all_reduce(parts).view(num_rows, size * width)


_SUMMED_TOGETHER = 4
"""Token ids by which a sum grows: one-shot sums take multiples of 16 bytes."""


def broadcast_token_ids(
    communicator: Communicator, token_ids: torch.Tensor | None, count: int, device: torch.device
) -> torch.Tensor:
    """The ``token_ids`` [count] int32 of rank 0 on every rank; the others give None.

    A sum to which the others add zeros, queued on the current stream like any: the host does not wait. float32 holds
    ids below 2**24 exactly.
    """
    if communicator.shard.size == 1 and token_ids is not None:
        return token_ids
    part = torch.zeros(-(-count // _SUMMED_TOGETHER) * _SUMMED_TOGETHER, dtype=torch.float32, device=device)
    if token_ids is not None:
        part[:count].copy_(token_ids)
    return communicator.all_reduce(part)[:count].int()
