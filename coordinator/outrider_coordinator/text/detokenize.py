"""Text from tokens as they come, never splitting a character.

Decoding a token alone is wrong: a character may be spread over several tokens, and some tokenizers drop a leading
space. So a window of ids is decoded, beginning some tokens back where the text is known, and what is new in it is
given out. A character that is not whole yet shows as U+FFFD at the window's end and is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.tokenization import TextTokenizer

REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 5
_MAX_WINDOW_TOKENS = 64
"""A window only grows while it ends inside a character; past this it is no text, and is given out as it stands."""


class Detokenizer:
    """The text of one output."""

    def __init__(
        self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_context = len(self._window)
        """Tokens at the window's start that only give context."""
        # A prompt may end inside a character: it becomes whole in the output.
        self._num_given_out = len(self._decode().rstrip(REPLACEMENT))
        """Characters of the window's text that have been given out."""

    def push(self, token_id: int) -> str:
        """Add a token; the text that is final now, possibly none."""
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._window) <= _MAX_WINDOW_TOKENS:
            # All of them: some decoders show each byte of an unfinished character as one.
            return self._give_out(text.rstrip(REPLACEMENT))
        new = self._give_out(text)
        self._slide()
        return new

    def flush(self) -> str:
        """What was held back, when no more tokens come: a character that stays incomplete is U+FFFD."""
        new = self._give_out(self._decode())
        self._slide()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skips)

    def _give_out(self, text: str) -> str:
        new = text[self._num_given_out :]
        self._num_given_out = max(self._num_given_out, len(text))
        return new

    def _slide(self) -> None:
        """Begin the window where the text that was new before this time began."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_given_out = self._tokenizer.num_characters(self._window, skip_special_tokens=self._skips)
