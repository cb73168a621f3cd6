"""Proposals by suffix decoding: no model, no torch.

SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975; Arctic Inference): a suffix tree over the request's own tokens,
and one over the outputs of all requests, say how often each token followed the text's last tokens. From each match the
likeliest continuation is followed while its probability stays above a floor, and for no more tokens than the match is
long. The continuation with the largest sum of probabilities is proposed, so the statistics set its length.

Both trees are suffix automata (``suffix_automaton``). Outputs are shared only among requests of one ``cache_salt``.
Greedy and coupled requests look for matches in others' outputs; under the other rules they do not. There an output
depends on the drafts, so a request would not repeat with its seed, and outputs of the same seed were drawn with the
very numbers that judge the draft, which would change the distribution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import DraftSettings
from outrider.types import JudgingRule
from outrider_draft.proposers.base import UNLIMITED_LENGTH, DraftTokens, ProposalRequest, Proposer
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv
from outrider_draft.proposers.text.suffix_automaton import ROOT, SuffixAutomaton

_STATE = "suffix"
_FREE_OF_DRAFTS = (JudgingRule.GREEDY, JudgingRule.COUPLED)
"""Rules under which the output does not depend on what is drafted."""


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """Suffix decoding, served."""
    return without_kv(SuffixProposer.load(settings), settings, name="suffix")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Probable continuation of a text."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    """Sum over the tokens of the probability that all up to it are right: the number expected to be accepted."""


class OutputCache:
    """Outputs of requests of one salt: the newest, at most this many tokens.

    Two automata take turns: when the younger is full the older is forgotten, as nothing can be taken out of one.
    """

    def __init__(self, max_tokens: int) -> None:
        self._most = max(1, max_tokens // 2)
        self.younger, self.older = SuffixAutomaton(), SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.younger.num_tokens + self.older.num_tokens

    def append(self, state: tuple[SuffixAutomaton, int] | None, token_id: int) -> tuple[SuffixAutomaton, int]:
        """Take in the next token of an output; ``state`` is what the last call for that output returned."""
        if self.younger.num_tokens >= self._most:
            self.younger, self.older = SuffixAutomaton(), self.younger
        automaton = self.younger
        place = state[1] if state is not None and state[0] is automaton else ROOT
        return automaton, automaton.append(place, token_id)


class OutputCaches:
    """The caches of all salts, the one used longest ago forgotten first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._caches: OrderedDict[str, OutputCache] = OrderedDict()

    def of(self, salt: str) -> OutputCache:
        """The cache of a salt, empty where there is none."""
        cache = self._caches.setdefault(salt, OutputCache(self._max_tokens))
        self._caches.move_to_end(salt)
        while len(self._caches) > 1 and self.num_tokens > self._max_tokens:
            self._caches.popitem(last=False)
        return cache

    @property
    def num_tokens(self) -> int:
        """Tokens held for all salts."""
        return sum(cache.num_tokens for cache in self._caches.values())


class RequestText:
    """Text of one request: its own automaton, and how far its output is in the cache."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self._place = ROOT
        self._in_cache: tuple[SuffixAutomaton, int] | None = None
        self._last: int | None = None

    def follow(self, token_ids: Sequence[int], prompt_length: int, cache: OutputCache | None) -> bool:
        """Take in the tokens that are new; False when the text is not the one that was followed so far."""
        known = self.automaton.num_tokens
        if len(token_ids) < known or (known and token_ids[known - 1] != self._last):
            return False
        for position in range(known, len(token_ids)):
            token_id = token_ids[position]
            self._place = self.automaton.append(self._place, token_id)
            if cache is not None and position >= prompt_length:
                self._in_cache = cache.append(self._in_cache, token_id)
        self._last = token_ids[-1]
        return True


class SuffixProposer(Proposer):
    """Proposes what most often followed the text's last tokens."""

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 1 << 18,
        max_model_len: int = UNLIMITED_LENGTH,
    ) -> None:
        """``max_tree_depth``: longest match and continuation together. ``max_spec_factor``: tokens proposed for each
        token of the match. ``min_token_prob``: least probability of a proposed token, all before it included.
        ``max_cached_tokens``: tokens of outputs that are kept; 0 keeps none.
        """
        self.max_model_len = max_model_len
        self._max_depth, self._factor, self._floor = max_tree_depth, max_spec_factor, min_token_prob
        self.outputs = OutputCaches(max_cached_tokens) if max_cached_tokens else None
        """Outputs of ended requests by salt; None if none are kept."""

    @classmethod
    def load(cls, settings: DraftSettings) -> SuffixProposer:
        """Proposer with the settings' bounds."""
        return cls(
            max_tree_depth=settings.suffix_decoding_max_tree_depth,
            max_spec_factor=settings.suffix_decoding_max_spec_factor,
            min_token_prob=settings.suffix_decoding_min_token_prob,
            max_cached_tokens=settings.suffix_decoding_max_cached_tokens,
            max_model_len=settings.max_model_len or UNLIMITED_LENGTH,
        )

    def propose(self, requests: Sequence[ProposalRequest]) -> Sequence[DraftTokens]:
        """The best continuation of each text."""
        return [DraftTokens(self._continue(request).token_ids) for request in requests]

    def _continue(self, request: ProposalRequest) -> Continuation:
        cache = None if self.outputs is None else self.outputs.of(request.open.cache_salt)
        own = self._followed(request, cache)
        if not request.num_tokens:
            return Continuation()
        pattern = list(request.token_ids[-self._max_depth :])
        found = self._best(own.automaton, pattern, request.num_tokens)
        reads_cache = cache is not None and request.open.judging_rule in _FREE_OF_DRAFTS
        for automaton in (cache.younger, cache.older) if cache is not None and reads_cache else ():
            other = self._best(automaton, pattern, request.num_tokens)
            if other.score > found.score:  # the request's own text where both say the same
                found = other
        return found

    def _followed(self, request: ProposalRequest, cache: OutputCache | None) -> RequestText:
        text = request.state.get(_STATE)
        if text is None or not text.follow(request.token_ids, request.open.prompt_length, cache):
            text = request.state[_STATE] = RequestText()
            text.follow(request.token_ids, request.open.prompt_length, cache)
        return text

    def _best(self, automaton: SuffixAutomaton, pattern: Sequence[int], num_tokens: int) -> Continuation:
        best = Continuation()
        state, length = automaton.longest_match(pattern)
        for place, matched in automaton.shorter_matches(state, length):
            if matched * self._factor <= best.score:
                break  # shorter matches allow fewer tokens still
            most = min(num_tokens, self._longest_continuation(automaton.shortest(place), matched))
            if most <= best.score:
                continue
            found = self._follow(automaton, place, most)
            if found.score > best.score:
                best = found
        return best

    def _longest_continuation(self, shortest: int, longest: int) -> int:
        """Most tokens after a match of a length in between, all of which are followed by the same."""
        lengths = range(shortest, longest + 1)
        return max(min(int(length * self._factor), self._max_depth - length) for length in lengths)

    def _follow(self, automaton: SuffixAutomaton, state: int, most: int) -> Continuation:
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while len(token_ids) < most and (following := automaton.likeliest(state)) is not None:
            token_id, reached = following
            probability *= automaton.count(reached) / automaton.count(state)
            if probability < self._floor:
                break
            token_ids.append(token_id)
            score += probability
            state = reached
        return Continuation(tuple(token_ids), score)
