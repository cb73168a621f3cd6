"""Names of a checkpoint's tensors: from those on file to those of a ``Decoder``.

A model that takes images or sound too keeps its text part under names of its own, which differ by the release that
saved it.
"""

from __future__ import annotations

from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.families import ModelFamily

_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHER_PARTS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.",
    "embed_audio.", "vision_embedder.",
)  # fmt: skip


def name_in_decoder(name: str, family: ModelFamily) -> str:
    """Name in the decoder of a tensor on file."""
    if family.is_text_part:
        for prefix, ours in _TEXT_PREFIXES:
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
    return name


def is_of_other_part(name: str, family: ModelFamily) -> bool:
    """True for a tensor of a part of a checkpoint that the decoder does not have: MTP layers, images, sound."""
    if family.mtp is not None and name.startswith(family.mtp.prefix):
        return True
    return family.is_text_part and name.removeprefix("model.").startswith(_OTHER_PARTS)


def module_aliases(family: ModelFamily) -> tuple[tuple[str, str], ...]:
    """Aliases as ``Quantization.aliases`` has them: of a text part, and of projections that checkpoints keep as one."""
    prefixes = (
        (
            (r"^model\.", "model.language_model."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head$", "language_model.lm_head"),
        )
        if family.is_text_part
        else ()
    )
    fused = tuple((rf"\b{part}$", whole) for whole, parts in family.fused.items() for part in parts)
    return (*prefixes, *fused)


def projection_sizes(config: ModelConfig) -> dict[str, int]:
    """Rows of the projections that a checkpoint may keep as one."""
    keys, recurrent = config.num_kv_heads * config.head_dim, config.recurrent
    sizes = {
        "q_proj": config.num_heads * config.head_dim, "k_proj": keys, "v_proj": keys,
        "gate_proj": config.intermediate_size, "up_proj": config.intermediate_size,
    }  # fmt: skip
    if recurrent is None:
        return sizes
    keys = recurrent.num_key_heads * recurrent.key_dim
    return {**sizes, "in_proj_q": keys, "in_proj_k": keys, "in_proj_v": recurrent.num_heads * recurrent.value_dim}
