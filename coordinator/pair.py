"""Whether a draft fits its target, the same ids for the same tokens, and whether two targets are one model.

A draft never sees text, so ids decide; rows that pad a vocabulary may differ, since padded ids are never proposed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from outrider.errors import PairMismatchError
from outrider.types import ModelDescription

_SAME = (
    "model_name",
    "architecture",
    "vocab_size",
    "num_token_ids",
    "eos_token_ids",
    "bos_token_id",
    "dtype",
    "tokenizer_hash",
)
"""In what two targets have to agree so that a session may go on from one to the other."""
_log = logging.getLogger(__name__)
_MAX_EXAMPLES = 3


def check_same_model(known: ModelDescription, found: ModelDescription) -> None:
    """Raise ``PairMismatchError`` saying in what a target is not the one whose sessions it is to take over."""
    differing = [name for name in _SAME if getattr(known, name) != getattr(found, name)]
    if differing:
        told = "; ".join(f"{name} is {getattr(found, name)!r}, not {getattr(known, name)!r}" for name in differing)
        raise PairMismatchError(f"this target is not the model that is served here, {known.model_name}: its {told}")


def check_pair(target: ModelDescription, draft: ModelDescription) -> None:
    """Raise ``PairMismatchError`` saying how the two differ; a draft without a model always fits."""
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


def _compare_vocabularies(target: ModelDescription, draft: ModelDescription) -> None:
    of_target, of_draft = _tokens_by_id(target.tokenizer_files), _tokens_by_id(draft.tokenizer_files)
    names = f"the tokenizers of the draft {draft.model_name} and the target {target.model_name} differ"
    if not of_target or not of_draft:
        raise PairMismatchError(
            f"{names}: their hashes are {draft.tokenizer_hash[:12]} and {target.tokenizer_hash[:12]}"
        )
    differing = sorted(i for i in of_target.keys() | of_draft.keys() if of_target.get(i) != of_draft.get(i))
    if not differing:
        _log.warning("%s, but not in their token ids; the target's is used", names)
        return
    examples = "; ".join(
        f"id {i} is {of_draft.get(i)!r} in the draft and {of_target.get(i)!r} in the target"
        for i in differing[:_MAX_EXAMPLES]
    )
    raise PairMismatchError(
        f"{names}: {len(of_draft)} and {len(of_target)} tokens, {len(differing)} ids differ, the first: {examples}"
    )


def _tokens_by_id(files: Mapping[str, bytes]) -> dict[int, str]:
    """Token by id, from a ``tokenizer.json``; empty when there is none that can be read."""
    try:
        parsed = json.loads(files["tokenizer.json"])
        vocab = parsed["model"]["vocab"]
        tokens = {i: t for t, i in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(t for t, _ in vocab))
        tokens |= {added["id"]: added["content"] for added in parsed.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError):
        return {}
    return tokens
