"""Sums of four ranks in rank order: bits that do not follow the number of rows."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outrider.model_executor.distributed.device_communicators import GpuCommunicator
from outrider.model_executor.distributed.sharding import Shard

SIZE, NUM_ROWS, WIDTH = 4, 37, 40


def parts() -> torch.Tensor:
    """Numbers of the ranks, whose sum in another order has other bits."""
    return torch.randn(SIZE, NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def run_rank(store: str, rank: int, answers: multiprocessing.Queue[tuple[bool, bool, list[list[float]]]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    own = parts()[rank]
    ordered = GpuCommunicator(Shard(rank, SIZE), None, 0).in_rank_order()
    whole = ordered.all_reduce(own)
    rows = [ordered.all_reduce(own[first : first + count]) for first, count in ((0, 1), (5, 3), (20, 17))]
    pieces = [whole[0:1], whole[5:8], whole[20:37]]
    same = all(torch.equal(one, other) for one, other in zip(rows, pieces, strict=True))
    gathered = [torch.empty_like(whole) for _ in range(SIZE)]
    dist.all_gather(gathered, whole)
    same_everywhere = all(torch.equal(one, whole) for one in gathered)
    answers.put((same, same_everywhere, whole.tolist()))
    dist.destroy_process_group()


@pytest.mark.integration
def test_bits_do_not_follow_the_number_of_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[bool, bool, list[list[float]]]] = context.Queue()
    ranks = [context.Process(target=run_rank, args=(str(tmp_path / "store"), rank, answers)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    said = [answers.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
    own = parts()
    expected = own[0] + own[1] + own[2] + own[3]
    backwards = own[3] + own[2] + own[1] + own[0]
    assert not torch.equal(expected, backwards)  # else the numbers would show nothing
    for same, same_everywhere, whole in said:
        assert same
        assert same_everywhere
        assert torch.equal(torch.tensor(whole), expected)
