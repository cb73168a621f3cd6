"""Texts of tokens: the bytes that one token stands for, and their display.

Decoding a single token loses the space before a word and the bytes of a character that is spread over several tokens.
The vocabulary has both, in a form that depends on the tokenizer's decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from outrider.tokenization.decoding import byte_of, decoder_steps


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text of one token."""

    text: str
    """Incomplete characters are shown as U+FFFD."""
    utf8: bytes
    """The bytes, which may be an incomplete character."""


class TokenTexts:
    """The texts of a tokenizer's tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoders = list(decoder_steps(tokenizer))
        self._is_byte_level = any(decoder["type"] == "ByteLevel" for decoder in decoders)
        self._space = _space_mark(decoders)
        self._known: dict[int, TokenText] = {}

    def of(self, token_id: int) -> TokenText:
        """The text of a token; empty for an unknown id."""
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._make(token_id)
        return known

    def _make(self, token_id: int) -> TokenText:
        utf8 = self._bytes(token_id)
        return TokenText(utf8.decode("utf-8", "replace"), utf8)

    def _bytes(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self._space:
            return byte_of(token) or token.replace(self._space, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _space_mark(decoders: list[dict[str, Any]]) -> str:
    """The character for a space in the vocabulary, usually U+2581; empty if there is none."""
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            return str(decoder.get("replacement", ""))
        if decoder["type"] == "Replace" and decoder.get("content") == " ":
            return str(decoder.get("pattern", {}).get("String", ""))
    return ""


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level BPE uses for bytes: the byte itself if printable, otherwise one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


_BYTES = _byte_characters()
