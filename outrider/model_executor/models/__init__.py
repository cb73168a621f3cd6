"""Decoder models: what differs between architectures is data in ``ModelConfig``, the computation is one."""

from __future__ import annotations

from outrider.model_executor.models.config import ModelConfig, RopeConfig, read_model_config
from outrider.model_executor.models.decoder import Decoder

__all__ = ["Decoder", "ModelConfig", "RopeConfig", "read_model_config"]
