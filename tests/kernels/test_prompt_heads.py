"""Sizes of heads for which the library of long prompts is used on GPUs."""

from __future__ import annotations

import pytest
import torch

prompts = pytest.importorskip("outrider.kernels.paged_attention.prompts", reason="needs triton", exc_type=ImportError)
takes_heads = prompts.takes_heads


@pytest.mark.parametrize(
    ("capability", "version", "widest"), [((9, 0), 91_002, 256), ((9, 0), 90_100, 128), ((8, 0), 91_002, 128)]
)
def test_heads_that_the_library_lacks_are_left_to_the_other_kernels(
    capability: tuple[int, int], version: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_heads.cache_clear()
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert [size for size in (64, 80, 84, 128, 256, 512) if takes_heads(size, device)] == [
        size for size in (64, 80, 128, 256) if size <= widest
    ]
    takes_heads.cache_clear()
