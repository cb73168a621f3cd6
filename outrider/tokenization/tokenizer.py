"""Tokenizer of a target, from the bytes of its files or from a folder."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from outrider.errors import ConfigError, InvalidRequestError, ModelError
from outrider.limits import ANY_MODEL, TOKENIZER_BYTES, ModelLimits
from outrider.limits.bounded_files import read_of_folder
from outrider.tokenization.decoding import DecoderTraits, byte_of

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"
"""Character that stands for bytes that are no whole character."""

_USUAL_CHARACTERS = 8
"""Characters per token that usual text does not exceed: a longer text may be too long, and its beginning is tokenized
first.
"""
_GROWTH = 4
"""Growth factor of the parts of such a text."""
_SEAM_TOKENS = 64
"""Tokens that a beginning of a text may have more than the whole text has there, because the cut may split a token."""


class TokenKind(enum.Enum):
    """Kind of a token in a text."""

    NONE = enum.auto()
    """Token without text: an unknown id, or a special token that is skipped."""
    BYTE = enum.auto()
    """One byte of a byte-fallback run."""
    START = enum.auto()
    """Token whose text begins with a whole character when decoded alone: a window may begin at it."""
    INNER = enum.auto()
    """Any other token."""


@dataclass(frozen=True, slots=True)
class LoneToken:
    """A token decoded alone."""

    kind: TokenKind
    text: str


class TextTokenizer:
    """Text to ids and back. May be shared between sessions: its cache depends on no session."""

    def __init__(self, tokenizer: Tokenizer, *, bos_token_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._bos_token_id = bos_token_id
        self._traits = DecoderTraits.of(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._special_tokens = frozenset(token.content for token in added.values() if token.special)
        self._lone_tokens: dict[tuple[int, bool], LoneToken] = {}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, bos_token_id: int | None = None) -> TextTokenizer | None:
        """Create it from a description's tokenizer files; None without a ``tokenizer.json``."""
        content = files.get(TOKENIZER_FILE)
        return None if content is None else cls._parse(content, "the target's", bos_token_id)

    @classmethod
    def from_folder(cls, folder: Path | str, *, bos_token_id: int | None = None) -> TextTokenizer:
        """Create it from a folder with a ``tokenizer.json``; ``ConfigError`` if there is none."""
        path = Path(folder) / TOKENIZER_FILE
        try:
            content = read_of_folder(path.parent, path.name, TOKENIZER_BYTES.most)
        except OSError as error:
            raise ConfigError("coordinator.tokenizer", f"{path} cannot be read: {error.strerror}") from error
        return cls._parse(content, str(path), bos_token_id)

    @classmethod
    def _parse(cls, content: bytes, origin: str, bos_token_id: int | None) -> TextTokenizer:
        try:
            tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError("coordinator.tokenizer", f"{origin} tokenizer cannot be used: {error}") from error
        return cls(tokenizer, bos_token_id=bos_token_id)

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the library."""
        return self._tokenizer

    def added_token_id(self, text: str) -> int | None:
        """Id of the added token, special or not, that has this text; None if there is none."""
        return self._added_tokens.get(text)

    def is_special(self, text: str) -> bool:
        """True if a special token has this text, which ``skip_special_tokens`` leaves out."""
        return text in self._special_tokens

    def encode_prompt(
        self, text: str, *, limits: ModelLimits = ANY_MODEL, add_special_tokens: bool = True, field: str = "prompt"
    ) -> tuple[int, ...]:
        """Ids of a prompt; ``InvalidRequestError`` naming ``field`` if there are too many.

        ``add_special_tokens``: add the special tokens of the tokenizer, such as a beginning of sequence. A text that
        may be too long is tokenized in growing parts, so refusing it costs no more than a text that fits.
        """
        for part in _beginnings(text, limits.max_model_len):
            num_tokens = len(self.encode_part(part))
            if num_tokens > limits.max_model_len + _SEAM_TOKENS:
                raise InvalidRequestError(
                    field,
                    f"has {num_tokens} tokens in its first {len(part)} of {len(text)} characters;"
                    f" at most {limits.max_model_len - 1} leave room for one of output",
                )
        return tuple(self._encode_with_bos(text, add_special_tokens))

    def encode_truncated(
        self, text: str, most: int, *, keeps_end: bool, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The last ``most`` ids of a text, or without ``keeps_end`` the first ones.

        A long text is tokenized in parts that grow from this end, until they have ``most`` ids and those that the cut
        may have changed: the rest of the text costs nothing.
        """
        ids: list[int] = []
        for part in itertools.chain(_beginnings(text, most, from_end=keeps_end), [text]):
            ids = self._encode_with_bos(part, add_special_tokens)
            if len(ids) >= most + _SEAM_TOKENS:
                break
        return tuple(ids[-most:] if keeps_end else ids[:most])

    def _encode_with_bos(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self.encode_part(text, add_special_tokens=add_special_tokens)
        bos = self._bos_token_id
        if add_special_tokens and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_part(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Unlike ``encode``, ``encode_batch`` releases the interpreter lock."""
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if (panic := _panic_of(error, "encode this text")) is None:
                raise
            raise panic from error
        return ids

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word at the start of a text and after a space, if they differ."""
        # As in vLLM; in addition, a word with another number of tokens after a space is banned too.
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        return tuple(dict.fromkeys(map(self._encode_word, texts)))

    def _encode_word(self, text: str) -> tuple[int, ...]:
        ids = tuple(self.encode_part(text, add_special_tokens=False))
        if not ids or not text.strip():
            raise InvalidRequestError("bad_words", "holds a word without any tokens")
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; incomplete characters become U+FFFD."""
        try:
            text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if (panic := _panic_of(error, "decode these ids")) is None:
                raise
            raise panic from error
        return text

    @property
    def traits(self) -> DecoderTraits:
        """Properties of the decoder."""
        return self._traits

    def lone_token(self, token_id: int, skip_special_tokens: bool) -> LoneToken:
        """A token decoded alone; cached."""
        key = (token_id, skip_special_tokens)
        if (known := self._lone_tokens.get(key)) is None:
            text = self.decode([token_id], skip_special_tokens=skip_special_tokens)
            kind = self._kind(token_id, text, skip_special_tokens)
            known = self._lone_tokens[key] = LoneToken(kind, text)
        return known

    def _kind(self, token_id: int, text: str, skips: bool) -> TokenKind:
        token = self._tokenizer.id_to_token(token_id)
        # As the library has it: a token is skipped for its content.
        if token is None or (skips and self.is_special(token)):
            return TokenKind.NONE
        if self._traits.has_byte_fallback and byte_of(token):
            return TokenKind.BYTE
        return TokenKind.START if text and not text.startswith(REPLACEMENT) else TokenKind.INNER


def _panic_of(error: BaseException, task: str) -> ModelError | None:
    """The error for a panic of the library, which is no ``Exception`` and would end more than its session."""
    is_panic = type(error).__name__ == "PanicException"
    return ModelError(f"the tokenizer cannot {task}: {error}") if is_panic else None


def _beginnings(text: str, num_tokens: int, *, from_end: bool = False) -> Iterator[str]:
    """Growing parts, from one end on, of a text that has more characters than this many tokens usually have."""
    size = _USUAL_CHARACTERS * (num_tokens + _SEAM_TOKENS)
    while size < len(text):
        yield text[-size:] if from_end else text[:size]
        size *= _GROWTH
