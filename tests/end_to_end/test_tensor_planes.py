"""Dense evidence over the whole stack: the same tokens whether rows come inline or in shared memory."""

from __future__ import annotations

import pytest
import torch

from outrider.transport.link import pump as pump_module
from outrider.transport.planes import writer
from outrider.transport.planes.writer import SharedWriter
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

torch.set_num_threads(1)


async def generate(*, least_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of some requests, and how many tensors went through shared memory."""
    writers: list[SharedWriter] = []

    def make() -> SharedWriter:
        writers.append(SharedWriter())
        return writers[-1]

    monkeypatch.setattr(pump_module, "SharedWriter", make)
    monkeypatch.setattr(writer, "MIN_TENSOR_BYTES", least_bytes)
    model = cached_tiny_model("llama", seed=1)
    async with run_stack(model, cached_tiny_model("qwen2", seed=9), wire=True, evidence="dense") as stack:
        tokens = [
            (
                await stack.generate(prompt="abcabc", seed=seed, temperature=0.8, max_tokens=20, ignore_eos=True)
            ).token_ids
            for seed in range(4)
        ]
    assert [end.name for end in writers] == ["", ""], "a file has kept its name"
    return tokens, sum(end.num_written for end in writers)


async def test_the_plane_decides_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    inline, none = await generate(least_bytes=1 << 40, monkeypatch=monkeypatch)
    shared, many = await generate(least_bytes=1, monkeypatch=monkeypatch)
    assert none == 0
    assert many > 20, "both services hand over rows every step"
    assert inline == shared
