"""Hidden states as tensors: from what came, inline or by a plane, to the draft's device and type."""

from __future__ import annotations

import torch

from outrider.types import HiddenStates

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_tensor(states: HiddenStates, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[N, F] on the device. The bytes' number is checked where they arrive."""
    if not states.num_rows:
        return torch.empty(0, states.width, device=device, dtype=dtype)
    if states.tensor is not None:  # fetched from a plane
        fetched: torch.Tensor = states.tensor
        return fetched.to(device=device, dtype=dtype)
    flat = torch.frombuffer(bytearray(states.payload), dtype=_DTYPES[states.dtype])
    return flat.view(states.num_rows, states.width).to(device=device, dtype=dtype)
