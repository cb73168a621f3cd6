"""Weights that nobody trained, made where they are used: for measuring shapes whose files are not at hand.

Owns the noise. Every matrix is normal with the variance that keeps activations of one size, so that nothing overflows
and no product is cheaper than a real one's; what a model of such weights says means nothing.
"""

from __future__ import annotations

import torch

from outrider.engine.models.decoder import Decoder
from outrider.engine.models.linear import Linear


def fill_with_noise(decoder: Decoder, seed: int = 0) -> None:
    """Fill and prepare every parameter; the same seed gives the same weights on the same device. Ranks that share a
    model make different noise, but for what all of them hold.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed + decoder.shard.rank)
    decoder.embedding.normal_(0, 1, generator=generator)
    decoder.norm.weight.fill_(1)
    for layer in decoder.layers:
        layer.attention_norm.weight.fill_(1)
        layer.mlp_norm.weight.fill_(1)
        if layer.attention.qk_norm is not None:
            layer.attention.qk_norm.fill_(1)
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
            _fill(linear, generator)
    if decoder.config.tied_embeddings:
        decoder.head.prepare()
    else:
        _fill(decoder.head, generator)


def _fill(linear: Linear, generator: torch.Generator) -> None:
    linear.weight.normal_(0, linear.weight.shape[1] ** -0.5, generator=generator)
    if linear.bias is not None:
        linear.bias.zero_()
    linear.prepare()
