"""Detokenizer: streamed text equals the decode of all tokens, under every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.errors import ModelError
from outrider.tokenization import REPLACEMENT, TextTokenizer
from outrider_coordinator.text import Detokenizer
from tests.coordinator.text.tokenizer_kinds import KINDS, SPECIALS
from tests.coordinator.tokenizers_for_tests import text_tokenizer

NUM_CASES = 60
"""Random cases for each kind and each setting of ``skip_special_tokens``."""
TEXTS = ("hello world", "the 中é 😀😀", "do n't, not!", "\n\n  x", " ", "ŝ中中", "héllo\ufffd", "म क")


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    skips: bool


@cache
def vocabulary(tokenizer: TextTokenizer) -> dict[str, int]:
    return tokenizer.backend.get_vocab()


def random_ids(tokenizer: TextTokenizer, draw: random.Random, most: int) -> list[int]:
    """Texts, random tokens, bytes, special and unknown ids, in random order."""
    vocab = vocabulary(tokenizer)
    byte_ids = [token_id for token, token_id in vocab.items() if token.startswith("<0x")]
    sources: list[Callable[[], Sequence[int]]] = [
        lambda: tokenizer.encode_prompt(draw.choice(TEXTS), add_special_tokens=False),
        lambda: [draw.randrange(len(vocab) + 2) for _ in range(draw.randrange(5))],
        lambda: draw.choices(byte_ids, k=draw.randrange(5)) if byte_ids else [],
        lambda: [vocab[draw.choice(SPECIALS)]],
        lambda: [vocab["<unk>"]] * draw.randrange(3),
    ]
    ids: list[int] = []
    while len(ids) < most:
        ids += draw.choice(sources)()
    return ids[:most]


def random_case(tokenizer: TextTokenizer, draw: random.Random, *, skips: bool) -> Case:
    ids = random_ids(tokenizer, draw, draw.choice((3, 10, 30, 120)))
    cut = draw.randrange(len(ids) + 1)
    return Case(tuple(ids[:cut]), tuple(ids[cut:]), skips)


def text_of(tokenizer: TextTokenizer, case: Case, num_tokens: int | None = None) -> str:
    """Text of an output by its definition."""
    output = case.output if num_tokens is None else case.output[:num_tokens]
    whole = tokenizer.decode([*case.prompt, *output], skip_special_tokens=case.skips)
    before = tokenizer.decode(case.prompt, skip_special_tokens=case.skips).rstrip(REPLACEMENT)
    return whole[len(before) :]


def check(tokenizer: TextTokenizer, case: Case) -> None:
    """Text is right at the end, and at each token what is given out and pending is the text so far."""
    detokenizer, given_out = Detokenizer(tokenizer, case.prompt, skip_special_tokens=case.skips), ""
    whole = text_of(tokenizer, case)
    for count, token_id in enumerate(case.output, start=1):
        given_out += detokenizer.push(token_id)
        assert whole.startswith(given_out)
        so_far = (given_out + detokenizer.pending).rstrip(REPLACEMENT)
        assert so_far == text_of(tokenizer, case, count).rstrip(REPLACEMENT)
    assert given_out + detokenizer.flush() == whole
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decode_of_all(kind: Callable[[], TextTokenizer], skips: bool) -> None:
    tokenizer, draw = kind(), random.Random(f"{kind.__name__}{skips}")
    for _ in range(NUM_CASES):
        check(tokenizer, random_case(tokenizer, draw, skips=skips))


@pytest.mark.parametrize("kind", KINDS)
def test_each_cut_between_prompt_and_output_gives_the_text(kind: Callable[[], TextTokenizer]) -> None:
    tokenizer, draw = kind(), random.Random(kind.__name__)
    ids = random_ids(tokenizer, draw, 40)
    for cut in range(len(ids) + 1):
        check(tokenizer, Case(tuple(ids[:cut]), tuple(ids[cut:]), skips=True))


def test_a_pattern_of_more_tokens_than_a_cut_window_keeps_is_replaced() -> None:
    letters = "abcdefghijklz"
    words = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="z"))
    words.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(letters[:-1], "X")])
    ids = [*[12] * 70, *range(12), *[12] * 5, *range(11)]
    check(text_tokenizer(words), Case((12,), tuple(ids), skips=True))


def test_a_panic_of_the_library_is_an_error_of_the_model() -> None:
    """A panic is no ``Exception``: nothing would keep it to the session that it belongs to."""
    words = Tokenizer(models.WordLevel({" ": 0, "a": 1}, unk_token="a"))
    words.decoder = decoders.Strip(" ", 1, 1)
    tokenizer = text_tokenizer(words)
    assert tokenizer.decode([1]) == "a"
    with pytest.raises(ModelError, match="the tokenizer cannot decode these ids"):
        tokenizer.decode([0])
