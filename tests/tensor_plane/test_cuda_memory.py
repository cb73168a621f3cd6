"""Copies of whole words by a kernel, on a CPU; those between processes are in ``test_gpu``."""

from __future__ import annotations

import pytest
import torch

from outrider.tensor_plane.cuda_memory import copy_words


def test_every_bit_is_copied_and_nothing_beside_it() -> None:
    source = torch.randint(256, (147_456,), dtype=torch.uint8)
    ring = torch.zeros(20_000, dtype=torch.int64)
    copy_words(source, ring.narrow(0, 8, 18_432))
    assert torch.equal(ring[8:18_440].view(torch.uint8), source)
    assert not ring[:8].any()
    assert not ring[18_440:].any()
    out = torch.empty(6, 12_288, dtype=torch.bfloat16)  # with every pattern of NaN among them
    copy_words(ring.narrow(0, 8, 18_432), out.view(-1).view(torch.uint8))
    assert torch.equal(out.view(-1).view(torch.uint8), source)


@pytest.mark.parametrize("source_is_inference", [False, True])
@pytest.mark.parametrize("out_is_inference", [False, True])
def test_tensors_of_a_forward_and_others(*, source_is_inference: bool, out_is_inference: bool) -> None:
    with torch.inference_mode(source_is_inference):
        source = torch.arange(64, dtype=torch.uint8)
    with torch.inference_mode(out_is_inference):
        out = torch.zeros(64, dtype=torch.uint8)
    copy_words(source, out)
    with torch.inference_mode():
        assert torch.equal(out, source)
        copy_words(out, source)
