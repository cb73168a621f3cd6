"""Bad words: what a look-up finds is what comparing every word finds, and it costs no more than the longest word."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.sampling.logits_processors.bad_words import BadWords

Words = list[tuple[int, ...]]


def found_one_by_one(words: Words, tokens: list[int], start: int, length: int) -> list[int]:
    text = tuple(tokens[start:length])
    fitting = [word for word in words if len(word) - 1 <= len(text)]
    return sorted(word[-1] for word in fitting if text[len(text) - len(word) + 1 :] == word[:-1])


@pytest.mark.parametrize("num_ids", [1, 2, 3, 50])
def test_completions_are_those_of_all_words(num_ids: int) -> None:
    rng = random.Random(num_ids)
    for _ in range(60):
        words: Words = [
            tuple(rng.randrange(num_ids) for _ in range(rng.choice((2, 2, 3, 5, 9)))) for _ in range(rng.randrange(40))
        ]
        bad_words = BadWords(words)
        assert bool(bad_words) == bool(words)
        tokens = [rng.randrange(num_ids) for _ in range(30)]
        for _ in range(20):
            length = rng.randint(0, 30)
            start = rng.randint(0, length)
            assert sorted(bad_words.completed(tokens, start, length)) == found_one_by_one(words, tokens, start, length)


class CountedText(list[int]):
    """Counts the ids that are taken out of it."""

    num_taken = 0

    def __getitem__(self, key: Any) -> Any:
        taken = super().__getitem__(key)
        self.num_taken += len(taken) if isinstance(key, slice) else 1
        return taken


def test_a_look_up_reads_the_text_once_whatever_the_number_of_words() -> None:
    words: Words = [(*range(i, i + 120), 7, i) for i in range(1000)]  # all with one last token but one
    bad_words, text = BadWords(words), CountedText([5] * 200 + [7])
    assert bad_words.completed(text, 0, len(text)) == []
    assert text.num_taken <= 121
