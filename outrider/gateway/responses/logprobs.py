"""Logprobs in the forms of the two OpenAI APIs, and prompt logprobs in that of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.gateway.served_model import ServedModel
from outrider.types import TokenLogprob

Json = dict[str, Any]
_LEAST = -9999.0
"""Stand-in for minus infinity, which JSON does not have."""


class LogprobWriter:
    """Formats logprobs with the texts of tokens."""

    def __init__(self, model: ServedModel, *, writes_ids: bool) -> None:
        """``writes_ids``: tokens are written as ``token_id:ID``, so that no two look alike."""
        self._model, self._writes_ids = model, writes_ids

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, text_offset: int
    ) -> Json:
        """``/v1/completions``: lists with an entry for each token; None for a prompt's first token, which has none.

        ``text_offset``: number of characters before the first of these tokens.
        """
        tokens = [self._token(token_id) for token_id in token_ids]
        return {
            "text_offset": list(_offsets(tokens, text_offset)),
            "token_logprobs": [None if found is None else _finite(found.logprob) for found in logprobs],
            "tokens": tokens,
            "top_logprobs": [None if found is None else self._top(found) for found in logprobs],
        }

    def chat(self, logprobs: Iterable[TokenLogprob], num_top: int) -> Json:
        """``/v1/chat/completions``: an object for each token."""
        return {
            "content": [
                {
                    **self._entry(found.token_id, found.logprob),
                    "top_logprobs": [self._entry(token_id, value) for token_id, value in found.top[:num_top]],
                }
                for found in logprobs
            ]
        }

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> list[Json | None]:
        """Prompt logprobs as in vLLM: token id -> logprob, rank and token."""
        return [None if found is None else self._by_id(found) for found in logprobs]

    def _by_id(self, found: TokenLogprob) -> Json:
        ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(found.top, 1)}
        ranked[found.token_id] = (found.logprob, found.rank)
        return {
            str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": self._token(token_id)}
            for token_id, (value, rank) in ranked.items()
        }

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        top = {self._token(token_id): _finite(value) for token_id, value in reversed(found.top)}
        return {self._token(found.token_id): _finite(found.logprob)} | dict(reversed(top.items()))

    def _entry(self, token_id: int, value: float) -> Json:
        return {
            "token": self._token(token_id),
            "logprob": _finite(value),
            "bytes": list(self._model.token_text(token_id).utf8),
        }

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._writes_ids else self._model.token_text(token_id).text


def _offsets(tokens: Iterable[str], start: int) -> Iterable[int]:
    for token in tokens:
        yield start
        start += len(token)


def _finite(value: float) -> float:
    return max(value, _LEAST)
