"""Device memory of the KV cache: one tensor for each group of layers, divided into pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.kv_store import copy_pages
from outrider.kv_cache import KVCacheLayout, PageCopy


class KVCacheTensors:
    """Keys and values of ``num_slots`` tokens in all layers, uninitialised: what a free page holds is never read."""

    def __init__(self, layout: KVCacheLayout, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.groups = [  # [L, S, 2, H_kv, D] for each group
            torch.empty(
                len(group.layers),
                num_slots,
                2,
                group.spec.num_kv_heads,
                group.spec.head_dim,
                dtype=dtype,
                device=device,
            )
            for group in layout.groups
        ]
        self._layers = [self.groups[group][place] for group, place in layout.places]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.nbytes for group in self.groups)

    def layer(self, number: int) -> torch.Tensor:
        """[S, 2, H_kv, D] of one layer."""
        return self._layers[number]

    def copy_pages(self, copies: Sequence[PageCopy], *, page_size: int) -> None:
        """Copy pages in all layers; every source is read before any destination is written."""
        for group in self.groups:
            copy_pages(group, copies, page_size=page_size)

    def fill_(self, value: float) -> None:
        """Set every number; a test poisons free pages with it."""
        for group in self.groups:
            group.fill_(value)
