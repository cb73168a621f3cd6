"""Compatibility of a draft and a target (equal ids for equal tokens), and of two targets (the same model).

A draft does not see text, so ids decide. Padding rows of a vocabulary may differ, because padding ids are never
proposed.
"""

from __future__ import annotations

import logging

from outrider.errors import PairMismatchError
from outrider.types import ModelDescription
from outrider.vocabularies import check_same_ids, names_of, tokens_by_id

_SAME = (
    "model_name",
    "architecture",
    "vocab_size",
    "num_token_ids",
    "eos_token_ids",
    "bos_token_id",
    "dtype",
    "quantization",
    "batch_invariant",
    "tokenizer_hash",
)
"""Fields in which two targets have to agree so that a session may go on from one to the other."""
_log = logging.getLogger(__name__)
_FILE = "tokenizer.json"


def check_same_model(known: ModelDescription, found: ModelDescription) -> None:
    """Raise ``PairMismatchError``, naming the difference, if a target cannot take over the sessions of another."""
    differing = [name for name in _SAME if getattr(known, name) != getattr(found, name)]
    if differing:
        differences = "; ".join(
            f"{name} is {getattr(found, name)!r}, not {getattr(known, name)!r}" for name in differing
        )
        raise PairMismatchError(
            f"this target is not the model that is served here, {known.model_name}: its {differences}"
        )


def check_pair(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise ``PairMismatchError``, naming the difference; a draft without a model always fits."""
    if draft.hidden_state_layers:
        _check_hidden_states(target, draft)
    if not draft.vocab_size:
        return
    if draft.vocab_size < target.num_token_ids:
        raise PairMismatchError(
            f"the draft {draft.model_name} has {draft.vocab_size} rows, fewer than the {target.num_token_ids} token ids"
            f" of the target {target.model_name}"
        )
    if not draft.tokenizer_hash or not target.tokenizer_hash:
        _log.warning("draft or target has no tokenizer: whether their token ids mean the same cannot be checked")
    elif draft.tokenizer_hash != target.tokenizer_hash:
        _compare_vocabularies(target, draft)


def _check_hidden_states(target: ModelDescription, draft: ModelDescription) -> None:
    if draft.hidden_size != target.hidden_size:
        raise PairMismatchError(
            f"the draft {draft.model_name} reads hidden states of {draft.hidden_size} values, and those of the target"
            f" {target.model_name} have {target.hidden_size}"
        )
    if (layer := max(draft.hidden_state_layers)) > target.num_layers:
        raise PairMismatchError(
            f"the draft {draft.model_name} reads the hidden states of layer {layer}, and the target {target.model_name}"
            f" has {target.num_layers} layers"
        )


def _compare_vocabularies(target: ModelDescription, draft: ModelDescription) -> None:
    of_target, of_draft = (tokens_by_id(side.tokenizer_files.get(_FILE, b"")) for side in (target, draft))
    names = names_of(target.model_name, draft.model_name)
    if not of_target or not of_draft:
        raise PairMismatchError(
            f"{names}: their hashes are {draft.tokenizer_hash[:12]} and {target.tokenizer_hash[:12]}"
        )
    check_same_ids(names, of_target, of_draft)
    _log.warning("%s, but not in their token ids; the target's is used", names)
