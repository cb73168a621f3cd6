"""Decoder of a tokenizer: how the text of a token depends on the tokens around it.

``tokenizers`` decodes a whole list of ids. Streaming decodes windows of it, which needs to know where a window may
begin and which characters later tokens can still change. Both follow from the steps of the decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN_LENGTH = len("<0x00>")


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """Properties of a decoder that decide how it is used on windows."""

    is_byte_level: bool
    """Tokens are bytes: a text may end inside a character, which shows as one U+FFFD."""
    has_byte_fallback: bool
    """A run of byte tokens is decoded as a whole: any token of it may change the text of all of it."""
    needs_context: bool
    """The text of a token depends on the token before it, or on there being one."""
    is_local: bool
    """A window that begins at a token with a text of its own gives the text of the whole."""
    num_rewritten: int | None
    """Number of trailing characters of a text that a later token may rewrite; None: any of them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> DecoderTraits:
        """Traits of a tokenizer's decoder."""
        steps = list(decoder_steps(tokenizer))
        names = [str(step["type"]) for step in steps]
        joined = next((index for index, name in enumerate(names) if name in ("ByteLevel", "Fuse")), len(names))
        rewriting = [step for step in steps[joined + 1 :] if step["type"] not in ("Fuse", "Strip")]
        return cls(
            is_byte_level="ByteLevel" in names,
            has_byte_fallback="ByteFallback" in names,
            needs_context=not steps or any(_needs_context(step, index > joined) for index, step in enumerate(steps)),
            is_local=not rewriting,
            num_rewritten=_num_rewritten(rewriting),
        )


def decoder_steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Settings of the steps of a tokenizer's decoder, in order; none without a decoder."""
    if tokenizer.decoder is not None:
        # The settings of a decoder are only available through pickling, which gives the JSON of tokenizer.json.
        yield from _flat(json.loads(tokenizer.decoder.__getstate__()))


def byte_of(token: str) -> bytes:
    """The byte of a fallback token such as ``<0x0A>``; empty for any other."""
    if len(token) != _BYTE_TOKEN_LENGTH or not (token.startswith("<0x") and token.endswith(">")):
        return b""
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return b""


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for part in step["decoders"]:
        yield from _flat(part)


def _needs_context(step: Mapping[str, Any], is_joined: bool) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") != "never"
    if step["type"] == "Strip":
        return is_joined
    return step["type"] in ("BPEDecoder", "CTC", "WordPiece")


def _num_rewritten(rewriting: list[dict[str, Any]]) -> int | None:
    """Characters at the end of a joined text in which a pattern may begin that its steps replace."""
    if not rewriting:
        return 0
    pattern = rewriting[0]["pattern"].get("String") if rewriting[0]["type"] == "Replace" else None
    return len(pattern) - 1 if len(rewriting) == 1 and pattern else None
