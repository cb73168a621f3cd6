"""Sharding: the part of a model that each rank holds.

Owns the arithmetic, and says of a model that cannot be divided why not. Queries, keys, values, gate and up are
cut by their output, what follows them by its input, embedding and head by the vocabulary. With more ranks than key and
value heads, ranks that share one each hold a copy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.model_executor.models.config import ExpertsConfig, ModelConfig, RecurrentConfig

SETTING = "tensor_parallel_size"
EXPERT_SETTING = "enable_expert_parallel"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place among those that share a model."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ``ConfigError`` unless the model can be cut this many ways."""
        _require(config.num_heads % self.size == 0, self.size, f"its {config.num_heads} attention heads")
        for heads in {config.num_kv_heads, *(sizes.num_kv_heads for sizes in config.layer_sizes)}:
            fits = heads % self.size == 0 or self.size % heads == 0
            _require(fits, self.size, f"its {heads} key and value heads, nor they it")
        experts, recurrent = config.experts, config.recurrent
        has_mlp = experts is None or experts.has_mlp or not all(experts.layers)
        sizes = [config.intermediate_size] if has_mlp else []
        if experts is not None:
            sizes += [0 if experts.is_parallel else experts.intermediate_size, experts.shared_size]
        if experts is not None and experts.is_parallel and experts.count < self.size:
            raise ConfigError(
                SETTING, f"{self.size} does not fit this model: of {experts.count} experts each needs one"
            )
        if recurrent is not None:
            heads = recurrent.num_key_heads
            _require(heads % self.size == 0, self.size, f"its {heads} key heads of recurrent layers")
        for inner in sizes:
            _require(inner % self.size == 0, self.size, f"its MLP size {inner}")

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """Configuration of a rank's part, as of a model with only its heads and MLP columns."""
        return dataclasses.replace(
            config,
            num_heads=len(self.heads(config)),
            num_kv_heads=len(self.kv_heads(config)),
            intermediate_size=len(self.inner(config.intermediate_size)),
        )

    def heads(self, config: ModelConfig) -> range:
        """Attention heads of the shard."""
        return self._share(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> range:
        """Key and value heads of the shard: those that its attention heads look at."""
        if self.size <= config.num_kv_heads:
            return self._share(config.num_kv_heads)
        own = self.rank * config.num_kv_heads // self.size
        return range(own, own + 1)

    def experts(self, experts: ExpertsConfig) -> range:
        """Experts of the shard in a layer; with expert parallelism as many as the others have, or one more."""
        return self.inner(experts.count) if experts.is_parallel else range(experts.count)

    def key_heads(self, recurrent: RecurrentConfig) -> range:
        """Key heads of the shard in recurrent layers, whose value heads it has too."""
        return self._share(recurrent.num_key_heads)

    def inner(self, size: int, multiple: int = 1) -> range:
        """Columns of the shard of an MLP with as many, shared in units of ``multiple`` columns."""
        units = size // multiple
        first, end = (rank * units // self.size * multiple for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def vocab(self, config: ModelConfig) -> range:
        """Rows of the shard of embedding and head; those of the last ranks may be fewer than ``vocab_rows``."""
        start = min(self.rank * self.vocab_rows(config), config.vocab_size)
        return range(start, min(start + self.vocab_rows(config), config.vocab_size))

    def vocab_rows(self, config: ModelConfig) -> int:
        """Rows that every rank has room for, so that all give equally many logits."""
        return -(-config.vocab_size // self.size)

    def _share(self, count: int) -> range:
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def _require(holds: bool, size: int, what: str) -> None:
    if not holds:
        raise ConfigError(SETTING, f"{size} does not fit this model: it does not divide {what}")
