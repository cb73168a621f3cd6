"""Matcher: the state of a grammar after the tokens of an output, and the tokens that may come next.

The state follows from the tokens alone, so it is found again after any rejection, rebuild or resumption.

Shape letters: ``N`` masks, ``W`` words of 32 tokens each.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from outrider.errors import IntegrityError, InvalidRequestError, OutriderError
from outrider.structured_output.free_text import FreeText

Words = NDArray[np.int32]
AnswerT = TypeVar("AnswerT")
_MESSAGE_CHARACTERS = 300
_LONGEST_WAY_BACK = 32
"""Tokens that are consumed again each time before the state after them is kept."""


_MOST_RENEWED = 2
"""Engines for one answer: the first may be one that another matcher has compiled and others have filled."""
_LEXER_ERROR = "lexer error"


class Outcome(enum.Enum):
    """Outcome of matching tokens against a grammar."""

    OPEN = enum.auto()
    """Tokens that may be continued."""
    ENDED = enum.auto()
    """An end token ended them."""
    REFUSED = enum.auto()
    """One of them may not stand where it does."""


class Matcher:
    """Follows one output. Not thread-safe."""

    def __init__(
        self,
        engine: LLMatcher,
        *,
        vocab_size: int,
        end_token_ids: Collection[int],
        hidden_token_ids: Collection[int] = (),
        free_text: FreeText | None = None,
        note_masks: Callable[[float, int], None] = lambda seconds, count: None,
        renew: Callable[[LLMatcher], LLMatcher] = lambda engine: engine,
        field: str = "grammar",
    ) -> None:
        """``engine``: at the beginning of an output. ``end_token_ids`` may come only where the output matches as a
        whole, and end it. ``hidden_token_ids``: ends of sequence that the engine knows. ``free_text`` comes before
        what has to match. ``note_masks`` takes the seconds of some masks and their number. ``renew`` compiles the
        grammar of ``engine`` again: copies share a lexer, which fails for all of them once their outputs together have
        filled it. ``field``: of the request, for errors.
        """
        self._renew, self._field = renew, field
        self._origin = self._trunk = engine
        self._engine = engine.deep_copy()
        self._trunk_length = 0
        """Tokens that ``_trunk`` has consumed, the first of ``_consumed``. Engines are never rolled back: their masks
        may be those of the tokens that were taken back."""
        self._vocab_size = vocab_size
        self._ends = frozenset(token_id for token_id in end_token_ids if 0 <= token_id < vocab_size)
        self._special = _bits_of(self._ends.union(hidden_token_ids))
        self._end_bits = _bits_of(self._ends)
        self._consumed: list[int] = []
        """Tokens after the free text."""
        self._free_text, self._is_free = free_text, False
        self.note_masks = note_masks

    def follow(self, token_ids: Sequence[int]) -> Outcome:
        """Go to the state after exactly these output tokens, up to the first that is refused."""
        tokens = token_ids if isinstance(token_ids, list) else list(token_ids)
        if self._free_text is not None:
            length = self._free_text.length(tokens)
            self._is_free = length is None
            if length is None:
                return Outcome.REFUSED if self._ends.intersection(tokens) else Outcome.OPEN
            tokens = tokens[length:]
        consumed = self._consumed
        if tokens[: len(consumed)] != consumed:
            self._go_back(_common(consumed, tokens))
        for token_id in tokens[len(self._consumed) :]:
            if token_id in self._ends:
                return Outcome.ENDED if self._ask(LLMatcher.is_accepting, token_id) else Outcome.REFUSED
            # An id past the vocabulary would break the engine's state.
            if not 0 <= token_id < self._vocab_size or not self._take(token_id):
                return Outcome.REFUSED
            self._consumed.append(token_id)
        return Outcome.OPEN

    def next_token(self, token_ids: Sequence[int]) -> int | None:
        """The token that leads from this state to the one after exactly these; None if more than that is to be done."""
        count = len(self._consumed)
        if self._free_text is not None or len(token_ids) != count + 1:
            return None
        tokens = token_ids if isinstance(token_ids, list) else list(token_ids)  # long texts are copied once
        if tokens[:count] != self._consumed:
            return None
        token_id = token_ids[count]
        return token_id if 0 <= token_id < self._vocab_size and token_id not in self._ends else None

    @property
    def num_words(self) -> int:
        """W."""
        return (self._vocab_size + 31) // 32

    def mask(self) -> Words:  # [W]
        """Bit i of word w is set if token 32 * w + i may come next; ``InvalidRequestError`` for a grammar past the
        engine's bounds.
        """
        words = np.zeros((1, self.num_words), dtype=np.int32)
        if (error := fill_masks([(self, 0)], words)[0]) is not None:
            raise error
        found: Words = words[0]
        return found

    def forced_tokens(self) -> tuple[int, ...]:
        """Canonical tokens of the only text that may come next; empty if there are several."""
        return () if self._is_free else tuple(self._engine.compute_ff_tokens())

    def keep(self) -> None:
        """Remember this state, to go back to after tokens that may be rejected. Once its mask is made, masks of later
        states take microseconds: a copy has what the engine has computed of them, in hundreds of microseconds.
        """
        if not self._is_free and not self._engine.is_error():
            self._trunk, self._trunk_length = self._engine.deep_copy(), len(self._consumed)

    # For ``consume_tokens`` and ``fill_masks``.

    def note_consumed(self, token_id: int, *, is_accepted: bool) -> None:
        """The engine was given a token, and fails unless it was accepted: it is then as it was before."""
        if is_accepted:
            self._consumed.append(token_id)
        else:
            self._engine = self._trunk.deep_copy()
            self._engine.consume_tokens(self._consumed[self._trunk_length :])

    @property
    def grammar(self) -> LLMatcher:
        """Engine at the beginning of the output, of which those of other matchers of the grammar are copies."""
        return self._origin

    @property
    def engine(self) -> LLMatcher | None:
        """Engine that fills the mask; None in free text."""
        return None if self._is_free else self._engine

    def complete(self, words: Words) -> None:  # [W]
        """Say which tokens may end the output, in a mask that the engine has filled; ``InvalidRequestError`` for a
        grammar past the engine's bounds.
        """
        if self._is_free:
            words.fill(-1)
            _set_bits(words, self._special, value=False)
            return
        if self._engine.is_error():
            self._ask(partial(_fill, words))
        _set_bits(words, self._special, value=False)
        if self._engine.is_accepting():
            _set_bits(words, self._end_bits, value=True)

    def _take(self, token_id: int) -> bool:
        """Consume a token; False if it is refused."""
        return _consume(token_id, self._engine) or self._ask(partial(_consume, token_id), token_id)

    def _ask(self, question: Callable[[LLMatcher], AnswerT], token_id: int | None = None) -> AnswerT:
        """The engine's answer; ``InvalidRequestError`` if engines that are compiled anew fail too. ``token_id``: the
        token that a negative answer refuses.
        """
        problem: str | None = None
        for num_renewed in range(_MOST_RENEWED + 1):
            if num_renewed:
                self._begin_anew()
            answer = question(self._engine)
            problem = self._problem(token_id if not answer else None)
            if problem is None:
                return answer
        raise InvalidRequestError(self._field, f"cannot be followed further: {problem}")

    def _problem(self, refused: int | None) -> str | None:
        """Reason for a missing answer; None if there is one. A matcher that shares the lexer may have filled it: all
        copies then refuse every token, without an error where they are only asked for what they would consume.
        """
        if self._engine.is_error():
            return engine_problem(self._engine)
        if refused is None:
            return None
        tried = self._engine.deep_copy()
        tried.consume_tokens([refused])
        return engine_problem(tried) if _LEXER_ERROR in tried.get_error() else None

    def _begin_anew(self) -> None:
        """Consume the text with an engine that is compiled anew."""
        self._origin = self._trunk = self._renew(self._origin)
        self._trunk_length = 0
        self._engine = self._origin.deep_copy()
        self._engine.consume_tokens(self._consumed)

    def _go_back(self, length: int) -> None:
        """Go to the state after the first tokens, which are the trunk of what follows."""
        if length < self._trunk_length:
            self._trunk, self._trunk_length = self._origin, 0
        del self._consumed[length:]
        self._engine = self._trunk.deep_copy()
        self._engine.consume_tokens(self._consumed[self._trunk_length :])
        if length - self._trunk_length > _LONGEST_WAY_BACK:
            self.keep()


class MaskExecutors:
    """Threads that fill masks, without the interpreter lock. Matchers that share a lexer wait for its lock: they are
    filled by one thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._single, self._several = LLExecutor(num_threads=1), LLExecutor(num_threads=num_threads)

    def of(self, lexers: Collection[int]) -> LLExecutor:
        """Executors with one thread a lexer at most."""
        return self._several if len(set(lexers)) > 1 else self._single


def consume_tokens(tokens: Sequence[tuple[Matcher, int]], executors: MaskExecutors) -> set[Matcher]:
    """Consume the ``next_token`` of different matchers by one call of the engine. Returns those that have; others are
    left to ``follow``, which tells why one is refused.
    """
    if len(tokens) < 2:
        return set()
    by_lexer = sorted(tokens, key=lambda each: id(each[0].grammar))
    try:
        executor = executors.of([id(matcher.grammar) for matcher, _ in by_lexer])
        engines = [(engine, token_id) for matcher, token_id in by_lexer if (engine := matcher.engine) is not None]
        accepted = executor.consume_token_par(engines)
    except Exception:  # of one of them
        accepted = [False] * len(by_lexer)
    for (matcher, token_id), is_accepted in zip(by_lexer, accepted, strict=True):
        matcher.note_consumed(token_id, is_accepted=is_accepted)
    return {matcher for (matcher, _), is_accepted in zip(by_lexer, accepted, strict=True) if is_accepted}


def fill_masks(
    rows: Sequence[tuple[Matcher, int]], words: Words, executors: MaskExecutors | None = None
) -> list[OutriderError | None]:  # words [N, W]
    """Fill the masks of different matchers into these rows of ``words``; of each why it fails, if it does.
    ``executors`` have the threads for it.
    """
    began = time.perf_counter()
    by_lexer = sorted(rows, key=lambda each: id(each[0].grammar))  # neighbours are filled by one thread
    engines = [(engine, row) for matcher, row in by_lexer if (engine := matcher.engine) is not None]
    failures: dict[int, OutriderError] = {}
    try:
        if executors is None or len(engines) == 1:
            failures = _fill_each(engines, words)
        elif engines:
            executor = executors.of([id(matcher.grammar) for matcher, _ in rows])
            executor.unsafe_compute_mask_ptr(engines, words.ctypes.data, words.shape[1] * words.itemsize, len(words))
    except Exception:  # of one of them
        failures = _fill_each(engines, words)
    errors = [failures.get(row) or _completed(matcher, words[row]) for matcher, row in rows]
    for matcher, _ in rows[:1]:  # all have the same compiler
        matcher.note_masks(time.perf_counter() - began, len(rows))
    return errors


def _fill_each(engines: Sequence[tuple[LLMatcher, int]], words: Words) -> dict[int, OutriderError]:
    """Fill masks one by one; why rows fail."""
    failures = dict[int, OutriderError]()
    for engine, row in engines:
        try:
            _fill(words[row], engine)
        except Exception as error:
            failures[row] = as_session_error(error)
    return failures


def _completed(matcher: Matcher, words: Words) -> OutriderError | None:
    try:
        matcher.complete(words)
    except Exception as error:
        return as_session_error(error)
    return None


def as_session_error(error: Exception) -> OutriderError:
    """The error that a session fails with, whatever a grammar's engine has raised."""
    if isinstance(error, OutriderError):
        return error
    return IntegrityError(f"the grammar engine failed: {type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS])


def _fill(words: Words, engine: LLMatcher) -> None:
    engine.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def engine_problem(engine: LLMatcher) -> str:
    """Error message of an engine, without its state."""
    return " ".join(engine.get_error().partition("<state>")[0].split())[:_MESSAGE_CHARACTERS]


def _consume(token_id: int, engine: LLMatcher) -> bool:
    return engine.try_consume_tokens([token_id]) == 1


def _bits_of(token_ids: Collection[int]) -> Sequence[tuple[int, int]]:
    """Byte and mask of each token's bit."""
    return [(token_id // 8, 1 << token_id % 8) for token_id in token_ids]


def _set_bits(words: Words, places: Sequence[tuple[int, int]], *, value: bool) -> None:
    bits = words.view(np.uint8)
    for byte, mask in places:
        bits[byte] = bits[byte] | mask if value else bits[byte] & (mask ^ 0xFF)


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(first), len(second))
    if (first if len(first) == shorter else first[:shorter]) == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])
