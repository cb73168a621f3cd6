"""Decoder models: families and their configurations, one computation, the weights that fill it."""

from __future__ import annotations

from outrider.model_executor.models.config import FALLBACK_SPEED, AttentionWindow, ModelConfig, RopeConfig
from outrider.model_executor.models.config_reader import read_model_config
from outrider.model_executor.models.decoder import Decoder

__all__ = ["FALLBACK_SPEED", "AttentionWindow", "Decoder", "ModelConfig", "RopeConfig", "read_model_config"]
