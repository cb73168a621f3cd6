"""Device memory of the KV cache: a tensor for each group of layers, divided into pages, and states in slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.kernels.device_stream import to_device
from outrider.kernels.gated_delta import DeltaSlots
from outrider.kernels.kv_store import copy_pages
from outrider.kv_cache import KVCacheLayout, PageCopy
from outrider.kv_cache.state_slots import SlotCopy


class KVCacheTensors:
    """Keys and values of ``num_slots`` tokens in all layers, uninitialised: what a free page holds is never read."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_state_slots: int = 0,
        state_dtype: torch.dtype | None = None,
        page_size: int = 1,
        num_window_pages: int = 0,
    ) -> None:
        """``state_dtype`` of inputs in recurrent layers; None: ``dtype``. With ``num_window_pages`` layers with a
        window have this many pages of ``page_size``, and ``window_map`` says which belongs to a page of the others.
        """
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.groups = [  # [L, S, 2, H_kv, D] for each group
            torch.empty(
                len(group.layers),
                num_window_pages * page_size if num_window_pages and group.spec.window is not None else num_slots,
                2,
                group.spec.num_kv_heads,
                group.spec.head_dim,
                dtype=dtype,
                device=device,
            )
            for group in layout.groups
        ]
        self.window_map: torch.Tensor | None = None  # [num_slots / page_size] int32
        """Window page of each page that has one. None: all layers have the same pages."""
        if num_window_pages:
            self.window_map = torch.zeros(num_slots // page_size, dtype=torch.int32, device=device)
        self.num_state_slots = num_state_slots
        """Number of state slots of recurrent layers."""
        self.states: DeltaSlots | None = None
        if layout.states is not None:
            spec, sizes = layout.states.spec, (len(layout.states.layers), num_state_slots)
            self.states = DeltaSlots(
                torch.empty(*sizes, spec.num_heads, spec.key_dim, spec.value_dim, dtype=torch.float32, device=device),
                torch.empty(*sizes, spec.log_length, spec.num_inputs, dtype=state_dtype or dtype, device=device),
            )
        self._layers = [
            self.groups[group][place] if group < len(self.groups) else self._states_of(place)
            for group, place in layout.indices
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(tensor.nbytes for tensor in (*self.groups, *(self.states or ())))

    def layer(self, number: int) -> Any:  # noqa: ANN401 - the layer knows which
        """[S, 2, H_kv, D] of one layer, or the ``DeltaSlots`` of a recurrent one."""
        return self._layers[number]

    def copy_pages(self, copies: Sequence[PageCopy], *, page_size: int) -> None:
        """Copy pages in all layers but those with window pages; every source is read before any destination is
        written.
        """
        for group, tensor in zip(self.layout.groups, self.groups, strict=True):
            if self.window_map is None or group.spec.window is None:
                copy_pages(tensor, copies, page_size=page_size)

    def copy_window_pages(self, copies: Sequence[PageCopy], *, page_size: int) -> None:
        """Copy window pages in all layers that have them; every source is read before any destination is written."""
        for group, tensor in zip(self.layout.groups, self.groups, strict=True):
            if group.spec.window is not None:
                copy_pages(tensor, copies, page_size=page_size)

    def map_window_pages(self, pairs: NDArray[np.int32]) -> None:
        """Say which window pages belong to pages: one [page, window page] after the other."""
        if self.window_map is not None:
            pages, own = to_device(pairs, self.device).view(-1, 2).unbind(1)
            self.window_map.index_copy_(0, pages.long(), own)

    def copy_states(self, copies: Sequence[SlotCopy]) -> None:
        """Copy slots in all recurrent layers; every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = (torch.tensor(side, device=self.device) for side in zip(*copies, strict=True))
        for tensor in self.states or ():
            tensor.index_copy_(1, destinations, tensor.index_select(1, sources))

    def fill_(self, value: float) -> None:
        """Set every number; a test poisons free pages with it."""
        for tensor in (*self.groups, *(self.states or ())):
            tensor.fill_(value)

    def _states_of(self, place: int) -> DeltaSlots | None:
        return None if self.states is None else DeltaSlots(self.states.states[place], self.states.logs[place])
