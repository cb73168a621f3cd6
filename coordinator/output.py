"""The output of one session as it grows: what is emitted, and what ends it.

Owns the checks of every token in turn: ends of sequence, stop tokens, stop texts, the length. Tokens after the one that
ends a generation are dropped. Knows no steps and no services.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.actions import Emit, Finish
from coordinator.plan import Plan
from coordinator.text import Detokenizer, StopMatcher, TextTokenizer
from coordinator.text.stops import StopMatch
from outrider.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Growth:
    """What came of new tokens."""

    emit: Emit
    finish: Finish | None


class Output:
    """Tokens, text and logprobs after the prompt. Without a tokenizer there is no text."""

    def __init__(self, plan: Plan, tokenizer: TextTokenizer | None) -> None:
        self._plan = plan
        self._ending = plan.ending_token_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, plan.prompt_token_ids)
        self._stops = StopMatcher(plan.stop, include_stop=plan.include_stop)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0

    @property
    def num_remaining(self) -> int:
        """Tokens that may still come."""
        return self._plan.max_tokens - self._num_tokens

    @property
    def text(self) -> str:
        """All text given out."""
        return "".join(self._texts)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One for each token; None when not asked for."""
        return None if self._plan.num_logprobs is None else tuple(self._logprobs)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Growth:
        """Add the tokens of one step, up to the one that ends the generation."""
        texts: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            finish = self._push_one(token_id, texts)
            if finish is not None:
                return self._grow(token_ids[:count], logprobs, texts, finish)
        return self._grow(token_ids, logprobs, texts, None)

    def close(self) -> Emit:
        """Give out the text that was held back, when a generation is cut short."""
        texts: list[str] = []
        self._flush(texts)
        return self._grow((), None, texts, None).emit

    def _push_one(self, token_id: int, texts: list[str]) -> Finish | None:
        self._num_tokens += 1
        if token_id in self._ending:
            # Its own text is left out, as that of a stop text is, unless it was asked for.
            self._flush(texts, self._detokenize(token_id) if self._plan.include_stop else "")
            return Finish(FinishReason.STOP, token_id)
        if stop := self._push_text(self._detokenize(token_id), texts):
            return Finish(FinishReason.STOP, stop)
        if self.num_remaining == 0:
            self._flush(texts)
            return Finish(FinishReason.LENGTH)
        return None

    def _push_text(self, text: str, texts: list[str]) -> str | None:
        """Pass text through the stop texts; the one that was found."""
        found = self._stops.push(text, armed=self._num_tokens > self._plan.sampling.min_tokens)
        if isinstance(found, StopMatch):
            texts.append(found.text)
            return found.stop
        texts.append(found)
        return None

    def _flush(self, texts: list[str], last: str = "") -> None:
        """Give out everything held back, with ``last`` at its place."""
        texts += [self._stops.flush(), last]
        if self._detokenizer is not None:
            texts.append(self._detokenizer.flush())

    def _detokenize(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push(token_id)

    def _grow(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        texts: list[str],
        finish: Finish | None,
    ) -> Growth:
        kept = None if logprobs is None else tuple(logprobs[: len(token_ids)])
        text = "".join(texts)
        self._texts.append(text)
        self._logprobs.extend(kept or ())
        return Growth(Emit(tuple(token_ids), text, kept), finish)
