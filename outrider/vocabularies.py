"""Comparison of two tokenizers: equal meanings of equal ids, and their differences.

A draft never sees text, so ids decide; how text becomes ids may differ. Reads ``tokenizer.json`` as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from outrider.errors import PairMismatchError

_MAX_EXAMPLES = 3


def tokens_by_id(tokenizer_json: bytes) -> dict[int, str]:
    """Token by id; empty for what cannot be read."""
    try:
        parsed = json.loads(tokenizer_json)
        vocab = parsed["model"]["vocab"]
        tokens = {i: t for t, i in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(t for t, _ in vocab))
        tokens |= {added["id"]: added["content"] for added in parsed.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return tokens if all(type(token_id) is int for token_id in tokens) else {}


def check_same_ids(names: str, of_target: Mapping[int, str], of_draft: Mapping[int, str]) -> None:
    """Raise ``PairMismatchError`` with the first ids that differ; ``names`` begins its message."""
    differing = sorted(i for i in of_target.keys() | of_draft.keys() if of_target.get(i) != of_draft.get(i))
    if not differing:
        return
    examples = "; ".join(
        f"id {i} is {of_draft.get(i)!r} in the draft and {of_target.get(i)!r} in the target"
        for i in differing[:_MAX_EXAMPLES]
    )
    raise PairMismatchError(
        f"{names}: {len(of_draft)} and {len(of_target)} tokens, {len(differing)} ids differ, the first: {examples}"
    )


def names_of(target: str, draft: str) -> str:
    """Beginning of a message about both."""
    return f"the tokenizers of the draft {draft} and the target {target} differ"
