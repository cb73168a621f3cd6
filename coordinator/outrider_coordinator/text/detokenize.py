"""Detokenizer: text of an output as its tokens come.

The text of an output is ``decode(prompt + output)`` from where ``decode(prompt)``, less trailing U+FFFD, ends. Only
text that no later token can change is given out. A window of the tokens is decoded. It begins at a token with a text of
its own, so that it differs from the whole only before and inside that token (``DecoderTraits``).
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.tokenization import REPLACEMENT, LoneToken, TextTokenizer, TokenKind

_MAX_WINDOW_TOKENS = 64
"""Length at which a window of bytes that form no characters is cut."""
_NUM_CONTEXT_TOKENS = 8
"""Tokens that are left of it: more than the bytes after which UTF-8 decoders agree, and those of a character."""


class Detokenizer:
    """The text of one output."""

    def __init__(
        self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._traits = tokenizer.traits
        self._may_change = self._traits.is_byte_level or self._traits.num_rewritten != 0
        """A token that is no byte may change the text before it."""
        self._skips = skip_special_tokens
        self._window = list(prompt_token_ids[self._start_of_window(prompt_token_ids) :])
        self._text: str | None = self._decode()
        """Text of the window; None while it has not been decoded."""
        self._num_given_out = len(self._text.rstrip(REPLACEMENT))
        """Characters of the window's text that have been given out, or belong to the prompt."""

    def push(self, token_id: int) -> str:
        """Add a token; the text that is final now, possibly none."""
        token = self._tokenizer.lone_token(token_id, self._skips)
        if token.kind is TokenKind.NONE:
            return ""
        self._window.append(token_id)
        if token.kind is TokenKind.BYTE or self._traits.num_rewritten is None:
            self._text = None
            return ""
        text = self._text = token.text if len(self._window) == 1 else self._decode()
        end = self._num_final(text) if self._may_change else len(text)
        new = text[self._num_given_out : end]
        self._num_given_out = max(self._num_given_out, end)
        if self._num_given_out == len(text):
            self._slide(token)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut(text)
        return new

    @property
    def pending(self) -> str:
        """Whole characters that are held back, since a later token may change them."""
        if self._text is not None and self._num_given_out >= len(self._text):
            return ""
        return self._window_text()[self._num_given_out :].rstrip(REPLACEMENT)

    def flush(self) -> str:
        """Text that was held back, when no more tokens come: a character that stays incomplete is U+FFFD."""
        text = self._window_text()
        new = text[self._num_given_out :]
        self._num_given_out = max(self._num_given_out, len(text))
        return new

    def _start_of_window(self, token_ids: Sequence[int]) -> int:
        """Index of the last token at which a window may begin; 0 if there is none."""
        if self._traits.is_local:
            for index in range(len(token_ids) - 1, 0, -1):
                if self._tokenizer.lone_token(token_ids[index], self._skips).kind is TokenKind.START:
                    return index
        return 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skips)

    def _window_text(self) -> str:
        if self._text is None:
            self._text = self._decode()
        return self._text

    def _num_final(self, text: str) -> int:
        """Number of characters of the window's text that no later token changes."""
        end = len(text)
        if self._traits.is_byte_level and text.endswith(REPLACEMENT):
            end = end - 1 if self._traits.is_local else len(text.rstrip(REPLACEMENT))
        return max(end - (self._traits.num_rewritten or 0), 0)

    def _slide(self, token: LoneToken) -> None:
        """Begin the window after the last token, or at it where later texts depend on it. All text is given out."""
        traits = self._traits
        if not traits.is_local:
            return
        if not traits.needs_context:
            self._window, self._text, self._num_given_out = [], "", 0
        elif token.kind is TokenKind.START:
            del self._window[:-1]
            self._text, self._num_given_out = None, len(token.text)

    def _cut(self, text: str) -> None:
        """Shorten a window that is bytes without characters."""
        if self._traits.is_local and not self._traits.needs_context and not self._traits.has_byte_fallback:
            del self._window[:-_NUM_CONTEXT_TOKENS]
            self._text = self._decode()
            self._num_given_out -= len(text) - len(self._text)
