"""Layer context: what all layers of one rank's model are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outrider.model_executor.distributed.communicator import Communicator
from outrider.model_executor.layers.linear_method import LinearMethod, LinearSpec

if TYPE_CHECKING:
    from outrider.model_executor.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Configuration, types, ranks and weight format of a model."""

    config: ModelConfig
    """The whole model's."""
    part: ModelConfig
    """Part of the model that this rank computes."""
    dtype: torch.dtype
    device: torch.device
    communicator: Communicator
    linear_method: Callable[[LinearSpec], LinearMethod]
    """Factory of the form in which linear layers keep their weights."""
    batch_invariant: bool = False
    """True if a token's results must not depend on what is computed with it."""

    def of_layer(self, layer: int) -> LayerContext:
        """Context with the sizes of one layer."""
        config = self.config.of_layer(layer)
        if config is self.config:
            return self
        return replace(self, config=config, part=self.communicator.shard.part_of(config))

    @property
    def is_alone(self) -> bool:
        """True if one rank holds the whole model."""
        return self.communicator.shard.size == 1
