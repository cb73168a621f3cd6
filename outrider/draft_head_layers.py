"""Layers that draft heads read, by their configurations. Needs no torch: the command line checks folders with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def eagle3_field(config: Mapping[str, Any], name: str) -> object:
    """A field of EAGLE-3's own in a head's ``config.json``, which stands beside the layer's or in ``eagle_config``."""
    nested, found = config.get("eagle_config"), config.get(name)
    return nested.get(name) if found is None and isinstance(nested, Mapping) else found


def eagle3_layers(config: Mapping[str, Any], num_target_layers: int) -> object:
    """Layers that a head's ``config.json`` names, unchecked, else the ones that EAGLE-3 was published with: an early, a
    middle and a late one.
    """
    named = eagle3_field(config, "eagle_aux_hidden_state_layer_ids")
    return [2, num_target_layers // 2, num_target_layers - 3] if named is None else named


def dflash_layers(config: Mapping[str, Any], num_target_layers: int) -> object:
    """Layers that a DFlash drafter's ``config.json`` names, unchecked, the target's first being 0; else as many as the
    drafter has layers, evenly from the second to the third last.
    """
    own, fields = config.get("dflash_config"), config
    if isinstance(own, Mapping):
        named = own.get("target_layer_ids")
    else:  # the Speculators format, in which 0 is the embedding
        named, fields = config.get("aux_hidden_state_layer_ids"), config.get("transformer_layer_config") or {}
        named = [one - 1 if type(one) is int else one for one in named] if isinstance(named, list) else named
    count = fields.get("num_hidden_layers") if isinstance(fields, Mapping) else None
    if named is not None or type(count) is not int or not 0 < count <= num_target_layers:
        return named
    if count == 1:
        return [num_target_layers // 2]
    start, end = 1, num_target_layers - 3
    return [round(start + i * (end - start) / (count - 1)) for i in range(count)]
