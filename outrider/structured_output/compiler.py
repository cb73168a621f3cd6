"""Compiler of grammars for one tokenizer. Compiled grammars are cached by their content.

Thread-safe. Compiling takes milliseconds without the interpreter lock; the engine bounds its memory. What was refused
is remembered too, since some grammars take seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from outrider.errors import InvalidRequestError
from outrider.structured_output.embedding import EMBEDDED_LARK, to_lark
from outrider.structured_output.free_text import FreeText
from outrider.structured_output.matcher import Matcher, engine_problem
from outrider.structured_output.patterns import engine_pattern
from outrider.structured_output.schemas import (
    BLANKS,
    find_keyword,
    parse_schema,
    prepare_schema,
    schemas_of,
    subschemas,
)
from outrider.structured_output.statistics import GrammarStatistics
from outrider.structured_output.trial import is_compiled_within
from outrider.types import Grammar, GrammarKind, ModelDescription

_Kept = TypeVar("_Kept")

TOKENIZER_FILE = "tokenizer.json"
MAX_CACHED = 256
"""Compiled grammars that are kept: those used last."""
MAX_CACHED_CHARACTERS = 8 << 20
"""Characters of all of them."""
LONGEST_COMPILE_S = 0.5
"""Most processor time that a grammar may take to compile, some 50 times what the hardest schemas of a public set take
and 3 times a list of 20,000 texts: other new grammars wait for it, and a target compiles it too, between two steps.
"""
_MOST_SHARING = 8
"""Matchers in use that share a lexer and its lock, before the grammar is compiled once more."""
_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*\])")
_FAILED = re.compile(r"failed to compile JSON schema: (.*?)(?:\s\d+ \| .*)?$", re.DOTALL)
"""Prefix of a message about a part of the grammar."""
_OF_GRAMMAR = re.compile(r"^at \d+\(\d+\): (?:invalid regex .*? \(in regex\): )?|\n +\d+ \| .*$", re.DOTALL)
"""Places in a grammar that a request did not have: regular expressions and choices are translated into one, and an
answer's is a part of one of reasoning and calls.
"""
_MATCHES_NOTHING = "NoExtensionBias"
_NESTED = "recursion limit exceeded"
_MESSAGE_CHARACTERS = 300
_MOST_TRIED = 200
"""Parts of a schema."""
LONGEST_SEARCH_S = 0.5
"""Longest search for the part of a schema that cannot be compiled: each try compiles all within a part again."""


class _Refused(Exception):
    """A grammar cannot be compiled; the message is what a request's error says."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar, and the matchers in use that share its lexer."""

    engine: LLMatcher
    matchers: WeakSet[Matcher] = field(default_factory=WeakSet)


class GrammarCompiler:
    """Compiles grammars for the tokenizer of one model."""

    def __init__(
        self,
        tokenizer_files: Mapping[str, bytes],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tries_first: bool = False,
    ) -> None:
        """``tokenizer_files``: those of the model's description. ``eos_token_ids``: its ends of sequence.
        ``tries_first``: grammars that may take long are compiled in a process of their own first.
        """
        self._tries_first = tries_first
        self._content = tokenizer_files.get(TOKENIZER_FILE)
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self.num_lexers = 1
        """Threads that fill the masks of one grammar, at most."""
        self._tokenizer: LLTokenizer | None = None
        self.statistics = GrammarStatistics()
        self._lock = threading.Lock()
        self._cached: OrderedDict[Grammar, list[_Compiled]] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        """Messages of grammars that were refused last."""

    @classmethod
    def of(cls, description: ModelDescription, *, tries_first: bool = False) -> GrammarCompiler | None:
        """The compiler for a model; None if it has no tokenizer."""
        if TOKENIZER_FILE not in description.tokenizer_files:
            return None
        vocab_size, eos = description.vocab_size, description.eos_token_ids
        return cls(description.tokenizer_files, vocab_size=vocab_size, eos_token_ids=eos, tries_first=tries_first)

    def compile(self, grammar: Grammar, end_token_ids: Collection[int]) -> Matcher:
        """A matcher at the beginning of the output, which one of ``end_token_ids`` ends; ``InvalidRequestError`` says
        what the grammar may not be.
        """
        compiled = self._compiled(grammar)
        matcher = Matcher(
            compiled.engine,
            vocab_size=self._vocab_size,
            end_token_ids=end_token_ids,
            hidden_token_ids=self._eos,
            free_text=FreeText(grammar.after.encode(), self._bytes_of) if grammar.after else None,
            note_masks=self.statistics.note_masks,
            renew=partial(self._renewed, grammar),
            field=grammar.field,
        )
        with self._lock:
            compiled.matchers.add(matcher)
        return matcher

    def _compiled(self, grammar: Grammar) -> _Compiled:
        """The one whose lexer the fewest share; a new one where all are shared by many."""
        with self._lock:
            found = self._cached.get(grammar, [])
            if found:
                self._cached.move_to_end(grammar)
            least = min(found, key=lambda each: len(each.matchers), default=None)
            if least is not None and (len(least.matchers) < _MOST_SHARING or len(found) >= self.num_lexers):
                return least
        return self._keep(grammar, _Compiled(self._measured(grammar)))

    def _renewed(self, grammar: Grammar, failed: LLMatcher) -> LLMatcher:
        """An engine compiled after one whose lexer is full, for all matchers that share it. Those compiled beside it
        have lexers that may be as full.
        """
        with self._lock:
            found = self._cached.get(grammar, [])
            lost = next((each for each in found if each.engine is failed), None)
            if lost is None and found:
                return found[-1].engine
            found[:] = [each for each in found if each is not lost]
        matchers = WeakSet[Matcher]() if lost is None else lost.matchers
        return self._keep(grammar, _Compiled(self._measured(grammar), matchers)).engine

    def _keep(self, grammar: Grammar, new: _Compiled) -> _Compiled:
        with self._lock:
            self._cached.setdefault(grammar, []).append(new)
            _drop_oldest(self._cached, len)
        return new

    def _measured(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            problem = self._refused.get(grammar)
        if problem is None:
            try:
                return self._compiled_in_time(grammar)
            except _Refused as error:
                problem = str(error)
                self._remember(grammar, problem)
        self.statistics.note_refused()
        raise InvalidRequestError(grammar.field, problem)

    def _compiled_in_time(self, grammar: Grammar) -> LLMatcher:
        self._prepared_tokenizer()
        began, began_computing = time.perf_counter(), time.thread_time()
        engine = self._compile(grammar)
        if (seconds := time.thread_time() - began_computing) > LONGEST_COMPILE_S:
            raise _Refused(f"takes {seconds:.1f} s to compile, over the {LONGEST_COMPILE_S:g} s that it may take")
        self.statistics.note_compiled(time.perf_counter() - began)
        return engine

    def _remember(self, grammar: Grammar, problem: str) -> None:
        with self._lock:
            self._refused[grammar] = problem
            _drop_oldest(self._refused, lambda _: 1)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None or not 0 <= token_id < self._vocab_size:
            return b""
        found: bytes = self._tokenizer.decode_bytes([token_id])
        return found

    def warm_up(self) -> None:
        """Prepare the tokenizer, which takes up to a second; one that cannot be used is told to who needs it."""
        with contextlib.suppress(_Refused):
            self._prepared_tokenizer()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer, translated = self._prepared_tokenizer(), _translate(grammar)
        with self._lock:
            is_new = grammar not in self._cached
        if self._tries_first and is_new and not is_compiled_within(grammar, translated, 2 * LONGEST_COMPILE_S):
            raise _Refused(f"takes more than the {LONGEST_COMPILE_S:g} s of a processor that it may take to compile")
        engine = LLMatcher(tokenizer, translated, log_level=0)
        if engine.is_error():
            raise _Refused(_problem(grammar, engine.get_error()))
        if problem := _first_problem(engine, self._vocab_size):
            is_empty = _MATCHES_NOTHING in problem
            what = "matches no text" if is_empty else f"is too large to be followed: {problem}"
            raise _Refused(what)
        return engine

    def _prepared_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if self._content is None:
                    raise _Refused("cannot be used, since the model has no tokenizer")
                try:
                    self._tokenizer = LLTokenizer(
                        self._content.decode(), n_vocab=self._vocab_size, eos_token=list(self._eos) or None
                    )
                except ValueError as error:
                    problem = f"cannot be used with this model's tokenizer: {error}"
                    raise _Refused(problem[:_MESSAGE_CHARACTERS]) from error
            return self._tokenizer


def _drop_oldest(kept: OrderedDict[Grammar, _Kept], num_copies: Callable[[_Kept], int]) -> None:
    """Keep within the bounds on grammars, and on the characters of all their copies."""
    num_characters = sum(len(grammar.text) * num_copies(found) for grammar, found in kept.items())
    while len(kept) > MAX_CACHED or num_characters > MAX_CACHED_CHARACTERS:
        grammar, found = kept.popitem(last=False)
        num_characters -= len(grammar.text) * num_copies(found)


def _first_problem(engine: LLMatcher, vocab_size: int) -> str:
    """Reason why the first mask, or the first token that it allows, is past the engine's bounds; empty if none is."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    engine.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # its copies then have it
    tried, allowed = engine.deep_copy(), np.flatnonzero(words)
    if len(allowed):
        word = int(words[allowed[0]])
        tried.try_consume_tokens([int(allowed[0]) * 32 + (word & -word).bit_length() - 1])
    return engine_problem(tried) if tried.is_error() else ""


def _translate(grammar: Grammar) -> str:
    """The grammar in the engine's form."""
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = prepare_schema(parse_schema(grammar.text))
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANKS})
        if grammar.kind is GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(engine_pattern(grammar.text))
        return LLMatcher.grammar_from_lark(to_lark(grammar.kind, grammar.text))
    except Exception as error:  # of any type, by what is wrong
        raise _Refused(" ".join(str(error).split())[:_MESSAGE_CHARACTERS]) from error


def _problem(grammar: Grammar, message: str) -> str:
    """The engine's message; of a schema, with the path of a keyword that the engine does not support."""
    if (found := _UNSUPPORTED.search(message)) is not None:
        return f"{_path_of(grammar, json.loads(found.group(1)))} is not supported"
    if "oneOf constraints" in message:
        return f"{_path_of(grammar, ['oneOf'])} is not supported where its branches may overlap; anyOf is"
    failed = _FAILED.search(message)
    found_reason = message if failed is None else failed.group(1)
    if grammar.kind in (GrammarKind.REGEX, GrammarKind.CHOICE) or EMBEDDED_LARK in grammar.text:
        found_reason = _OF_GRAMMAR.sub("", found_reason)
    reason = " ".join(found_reason.split())
    if _NESTED in reason:
        return "is nested too deeply for the engine, which takes some 60 objects in each other"
    is_of_schema = failed is not None or grammar.kind is GrammarKind.JSON_SCHEMA
    return (_located(grammar, reason) if is_of_schema else reason)[:_MESSAGE_CHARACTERS]


def _path_of(grammar: Grammar, keywords: Sequence[str]) -> str:
    """Path of the first of these keywords; the keywords if none is found."""
    found = (find_keyword(schema, keywords) for schema in schemas_of(grammar))
    return next(filter(None, found), ", ".join(keywords))


def _located(grammar: Grammar, reason: str) -> str:
    """Reason why a schema cannot be compiled, after the path of the innermost part that cannot for the same reason;
    without a path if that is not found soon.
    """
    last = time.perf_counter() + LONGEST_SEARCH_S
    for schema in schemas_of(grammar):
        parts = list(itertools.islice(subschemas(schema), _MOST_TRIED))
        for pointer, part in reversed(parts):
            if time.perf_counter() > last:
                return reason
            if reason in _reason_of(part):
                return f"{pointer}: {reason}" if pointer else reason
    return reason


def _reason_of(schema: Mapping[str, Any]) -> str:
    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(dict(schema)))
    except ValueError as error:
        problem = str(error)
    return " ".join(problem.split())
