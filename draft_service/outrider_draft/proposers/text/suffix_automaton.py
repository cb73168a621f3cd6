"""Suffix automaton with counts: every substring of some token sequences, how often it stands there, what follows it.

It holds what a suffix tree holds, in at most two states a token, and grows by one token at a time in amortised constant
time (Blumer et al., 1985). Several sequences may grow in turn. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROOT = 0
"""The state of the empty string, where every sequence begins."""


class SuffixAutomaton:
    """States are numbers. The strings of one state end at the same places, and are each other's suffixes."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens appended so far."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        """The state of the longest suffix that ends at more places."""
        self._length = [0]
        """Length of each state's longest string."""
        self._count = [0]

    @property
    def num_states(self) -> int:
        """States, the root included."""
        return len(self._length)

    def append(self, state: int, token_id: int) -> int:
        """Let a sequence that is at ``state`` go on with a token; returns where it is then."""
        self.num_tokens += 1
        reached = self._step(state, token_id)
        above = reached
        while above != ROOT:
            self._count[above] += 1
            above = self._link[above]
        return reached

    def longest_match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The state and length of the longest suffix of ``token_ids`` that stands in a sequence; 0: none does."""
        state, length = ROOT, 0
        for token_id in token_ids:
            while state != ROOT and token_id not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            following = self._next[state].get(token_id)
            if following is not None:
                state, length = following, length + 1
        return state, length

    def shorter_matches(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """A match, then the suffixes of it that stand at more places, each with its length."""
        while state != ROOT:
            yield state, length
            state = self._link[state]
            length = self._length[state]

    def shortest(self, state: int) -> int:
        """Length of a state's shortest string."""
        return self._length[self._link[state]] + 1

    def count(self, state: int) -> int:
        """Number of occurrences of a state's strings in the sequences."""
        return self._count[state]

    def likeliest(self, state: int) -> tuple[int, int] | None:
        """(token, state) of what follows most often, the lowest id of those alike; None where nothing follows."""
        following = self._next[state]
        if not following:
            return None
        token_id = min(following, key=lambda token_id: (-self._count[following[token_id]], token_id))
        return token_id, following[token_id]

    def _step(self, state: int, token_id: int) -> int:
        known = self._next[state].get(token_id)
        if known is not None:  # another sequence has been here
            return known if self._length[known] == self._length[state] + 1 else self._split(state, token_id, known)
        made = self._new(self._length[state] + 1, {}, 0)
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = made
            state = self._link[state]
        if state == -1:
            self._link[made] = ROOT
            return made
        known = self._next[state][token_id]
        fits = self._length[known] == self._length[state] + 1
        self._link[made] = known if fits else self._split(state, token_id, known)
        return made

    def _split(self, state: int, token_id: int, known: int) -> int:
        """Give those strings of ``known`` that ``state`` leads to a state of their own: they end at more places now."""
        made = self._new(self._length[state] + 1, dict(self._next[known]), self._count[known])
        self._link[made] = self._link[known]
        self._link[known] = made
        while state != -1 and self._next[state].get(token_id) == known:
            self._next[state][token_id] = made
            state = self._link[state]
        return made

    def _new(self, length: int, following: dict[int, int], count: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._count.append(count)
        self._link.append(ROOT)
        return len(self._length) - 1
