"""Output of one session: the emitted tokens, and what ends them.

Checks every token in order: end of sequence, stop tokens, stop strings, length. Tokens after an end are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import IntegrityError, InvalidRequestError
from outrider.limits import EMITTED
from outrider.tokenization import TextTokenizer
from outrider.types import FinishReason, TokenLogprob
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import Finish
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.grammar_check import GrammarCheck
from outrider_coordinator.session.table import IntColumn, Row
from outrider_coordinator.text import Detokenizer, StopMatcher
from outrider_coordinator.text.stops import StopMatch


class Output:
    """Tokens, text and logprobs after the prompt. Without a tokenizer there is no text.

    Text is made when it is taken, so that services need not wait for it; only where a stop text may end the generation
    is it made at once.
    """

    num_remaining = IntColumn(col.REMAINING)
    """Number of tokens that may still be emitted."""

    def __init__(
        self, engine_request: EngineRequest, tokenizer: TextTokenizer | None, *, row: Row | None = None
    ) -> None:
        self.row = row or Row()
        self._engine_request = engine_request
        self.ending_token_ids = engine_request.ending_token_ids
        self._max_tokens, self._has_stops = engine_request.max_tokens, bool(engine_request.stop)
        self.num_remaining = self._max_tokens
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(
                tokenizer, engine_request.prompt_token_ids, skip_special_tokens=engine_request.skip_special_tokens
            )
        )
        self._grammar = None if engine_request.matcher is None else GrammarCheck(engine_request.matcher)
        self._stops = StopMatcher(engine_request.stop, include_stop=engine_request.include_stop)
        self._unread: list[int] = []
        """Tokens whose text has not been made."""
        self._texts: list[str] = []
        """One for each token that has been read, and in the end what was held back."""
        self._num_taken = 0
        """Number of characters that were taken."""
        self._logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """All text that is final."""
        self._read()
        return "".join(self._texts)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One for each token; None if not requested."""
        return None if self._engine_request.num_logprobs is None else tuple(self._logprobs)

    def forced_token_ids(self) -> tuple[int, ...]:
        """Tokens of the only text that the grammar allows next; empty without a grammar or with a choice."""
        return () if self._grammar is None else self._grammar.forced_token_ids()

    def leaves_choice(self, token_ids: Sequence[int], *, most_forced: int) -> bool:
        """True if the grammar goes on after these tokens, and forces no more than ``most_forced`` of what follows;
        without a grammar always.
        """
        return self._grammar is None or self._grammar.leaves_choice(token_ids, most_forced=most_forced)

    def take_text(self, num_tokens: int | None = None) -> str:
        """The text that has become final since this was last asked, with the first ``num_tokens`` tokens; None: all.

        Text given out belongs to tokens given out, so that the ids alone say where a generation can be gone on with.
        """
        self._read()
        end = len(self._texts) if num_tokens is None else num_tokens
        taken = "".join(self._texts[self._num_taken : end])
        self._num_taken = max(self._num_taken, end)
        return taken

    def replay(self, token_ids: Sequence[int]) -> Finish | None:
        """Take in output that was given out before, elsewhere; what it ended with, if it did.

        ``InvalidRequestError`` when it goes on past its end.
        """
        finish = None
        for count, token_id in enumerate(token_ids):
            if finish is not None:
                raise InvalidRequestError(
                    EMITTED, f"continue after the token at {count - 1}, which ends the generation"
                )
            try:
                finish = self._push_one(token_id)
            except IntegrityError as error:
                raise InvalidRequestError(EMITTED, f"do not fit the request: {error}") from error
        self._read()
        self._num_taken = len(self._texts)
        return finish

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> tuple[int, Finish | None]:
        """Add the tokens of one step, up to the one that ends the generation: how many these are, and how it ends."""
        count, finish = 0, None
        while finish is None and count < len(token_ids):
            finish = self._push_one(token_ids[count])
            count += 1
        if logprobs is not None:
            self._logprobs += logprobs[:count]
        return count, finish

    def push_counted(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> tuple[int, Finish | None]:
        """``push`` tokens that the row's columns count already; only a stop text may end the generation in them."""
        if self._has_stops or self._grammar is not None:
            self.num_remaining += len(token_ids)
            return self.push(token_ids, logprobs)
        self._unread += token_ids
        if logprobs is not None:
            self._logprobs += logprobs
        return len(token_ids), None

    def close(self) -> None:
        """Discard the held-back text, when a generation is cut short."""
        self._flush()

    def _push_one(self, token_id: int) -> Finish | None:
        self.num_remaining -= 1
        if self._grammar is not None:
            self._grammar.take(token_id)
        if token_id in self.ending_token_ids:
            # Its own text is left out, as that of a stop text is, unless the request includes it.
            self._flush(token_id if self._engine_request.include_stop else None)
            return Finish(FinishReason.STOP, token_id)
        self._unread.append(token_id)
        if self._engine_request.stop and (stop := self._read()):
            return Finish(FinishReason.STOP, stop)
        if self.num_remaining == 0:
            self._flush()
            return Finish(FinishReason.LENGTH)
        return None

    def _read(self) -> str | None:
        """Make the text of the tokens that have none, passing it through the stop texts; the one that was found."""
        token_ids, self._unread = self._unread, []
        for token_id in token_ids:
            text, pending = self._detokenize(token_id), ""
            if self._has_stops and self._detokenizer is not None:
                pending = self._detokenizer.pending
            armed = self._max_tokens - self.num_remaining > self._engine_request.sampling.min_tokens
            found = self._stops.push(text, pending, armed=armed)
            if isinstance(found, StopMatch):
                self._texts.append(found.text)
                return found.stop
            self._texts.append(found)
        return None

    def _flush(self, last: int | None = None) -> None:
        """Let go of everything held back, with the text of the token ``last`` at its place."""
        self._read()
        own = "" if last is None else self._detokenize(last)
        self._texts += [self._stops.flush(), own]
        if self._detokenizer is not None:
            self._texts.append(self._detokenizer.flush())

    def _detokenize(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push(token_id)
