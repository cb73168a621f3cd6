"""Settings of the target service."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from outrider.config.fields import LayerList, Port, Positive, TensorPlane, Text
from outrider.config.schema.common import VLLM_METRIC_NAMES
from outrider.config.schema.model_service import ModelServiceSettings


class TargetSettings(ModelServiceSettings):
    """``outrider target``: the large model."""

    name: ClassVar[str] = "target"

    model: Text = Field(description="Folder of the model in the Hugging Face layout, or its id on the Hub.")
    port: Port = Field(50051, description="Port to listen on.")
    max_model_len: Positive | None = Field(
        None, description="Maximum length of prompt and output together, in tokens; unset: the model's."
    )
    compute_ahead: bool = Field(
        True,
        description="While no session speculates, compute up to two plain steps of each before they are asked for.",
    )
    tensor_plane: TensorPlane = Field(
        TensorPlane.AUTO,
        description="How hidden states reach a draft that reads them: auto is the fastest of the planes that both sides"
        " can use; inline is through the coordinator; shared_memory, gloo, nccl or cuda_ipc force one, and what it"
        " cannot take goes inline. With TLS, auto uses planes within a host only.",
    )
    hidden_state_layers: LayerList = Field(
        None,
        description="Layers whose hidden states CUDA graphs hand out from the start, such as 2,16,29: 0 is the"
        " embedding, -1 what the head reads; or METHOD:FOLDER of the eagle3 or dflash head that reads them. Unset: with"
        " outrider serve those of its draft head, else those that a draft asks for, at its first steps, which then take"
        " a capture each.",
    )
    vllm_metric_names: bool = VLLM_METRIC_NAMES
