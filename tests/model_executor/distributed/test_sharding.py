"""Part of a model that each rank holds, and errors for models that cannot be divided so."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.model_executor.distributed.rank_info import RankInfo, find_rank
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.models import ModelConfig, read_model_config
from tests.model_executor.parity import build

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "far", "MASTER_PORT": "1"}


def config(**overrides: int) -> ModelConfig:
    return read_model_config(build("llama", **overrides))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_the_whole_and_do_not_overlap(size: int) -> None:
    model = config(num_key_value_heads=4, vocab_size=271)
    shards = [Shard(rank, size) for rank in range(size)]
    for part, whole in (
        (Shard.heads, model.num_heads),
        (Shard.kv_heads, model.num_kv_heads),
        (lambda shard, model: shard.inner(model.intermediate_size), model.intermediate_size),
        (Shard.vocab, model.vocab_size),
    ):
        assert [index for shard in shards for index in part(shard, model)] == list(range(whole))
    assert all(len(shard.vocab(model)) <= shard.vocab_rows(model) for shard in shards)
    assert sum(shard.part_of(model).num_heads for shard in shards) == model.num_heads


def test_ranks_beyond_the_key_and_value_heads_share_them() -> None:
    model = config(num_key_value_heads=2)
    shards = [Shard(rank, 4) for rank in range(4)]
    assert [list(shard.kv_heads(model)) for shard in shards] == [[0], [0], [1], [1]]
    assert [list(shard.heads(model)) for shard in shards] == [[0], [1], [2], [3]]


def test_more_rows_than_the_vocabulary_has_are_nobodys() -> None:
    model = config(vocab_size=5)
    assert [list(Shard(rank, 4).vocab(model)) for rank in range(4)] == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize(
    ("size", "overrides", "what"),
    [
        (3, {}, "attention heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "key and value heads"),
        (4, {"intermediate_size": 50}, "MLP size 50"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_by_the_settings_name(
    size: int, overrides: dict[str, int], what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        Shard(0, size).check(config(**overrides))
    assert caught.value.field == "tensor_parallel_size"


def test_torchruns_variables_give_the_place() -> None:
    assert find_rank(4, TORCHRUN) == RankInfo(3, 4, 1)
    assert find_rank(1, TORCHRUN) == RankInfo(0, 1, is_started=False)
    assert find_rank(2, {}) == RankInfo(0, 2, is_started=False)
    with pytest.raises(ConfigError, match="is 2 and 4 processes were started") as caught:
        find_rank(2, TORCHRUN)
    assert caught.value.field == "tensor_parallel_size"
