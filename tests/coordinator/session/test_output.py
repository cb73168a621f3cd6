"""Ends of a generation, token by token, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.types import FinishReason, SamplingParams, TokenLogprob
from outrider_coordinator.session.actions import Finish
from outrider_coordinator.session.output import Output
from tests.coordinator.driving import make_plan
from tests.coordinator.tokenizers_for_tests import END, byte_level, text_tokenizer

TOKENIZER = text_tokenizer(byte_level())
END_ID = int(byte_level().token_to_id(END) or 0)


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode_prompt(text)


def output_of(**fields: Any) -> Output:
    return Output(make_plan(vocab_size=300, **{"max_tokens": 100, **fields}), TOKENIZER)


@dataclass(frozen=True)
class Grown:
    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


def push(output: Output, text: str | Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Grown:
    token_ids = ids(text) if isinstance(text, str) else tuple(text)
    count, finish = output.push(token_ids, logprobs)
    return Grown(token_ids[:count], output.take_text(), finish)


def test_text_and_tokens_grow() -> None:
    output = output_of()
    assert push(output, "ab").text == "ab"
    assert push(output, "é").token_ids == ids("é")
    assert output.text == "abé"
    assert output.num_remaining == 96


def test_the_length_ends_it_and_drops_the_rest() -> None:
    growth = push(output_of(max_tokens=3), "abcdef")
    assert (growth.text, growth.token_ids) == ("abc", ids("abc"))
    assert growth.finish == Finish(FinishReason.LENGTH)


def test_an_end_of_sequence_is_a_token_without_text() -> None:
    growth = push(output_of(eos_token_ids=(END_ID,)), (*ids("ab"), END_ID, *ids("cd")))
    assert growth.token_ids == (*ids("ab"), END_ID)
    assert growth.text == "ab"
    assert growth.finish == Finish(FinishReason.STOP, END_ID)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_tokens_text_is_kept_only_when_asked_for(include: bool, text: str) -> None:
    (b,) = ids("b")
    growth = push(output_of(stop_token_ids=(b,), include_stop=include), "abc")
    assert (growth.text, growth.finish) == (text, Finish(FinishReason.STOP, b))


def test_a_stop_text_across_tokens_drops_what_follows() -> None:
    output = output_of(stop=("END",))
    assert push(output, "xE").text == "x"
    growth = push(output, "NDyz")
    assert growth.token_ids == ids("ND")
    assert (growth.text, growth.finish) == ("", Finish(FinishReason.STOP, "END"))
    assert output.text == "x"


def test_a_stop_text_may_be_kept() -> None:
    output = output_of(stop=("END",), include_stop=True)
    push(output, "xEN")
    assert push(output, "Dy").text == "END"


def test_held_back_text_comes_with_the_end() -> None:
    output = output_of(stop=("END",), max_tokens=3)
    assert push(output, "xE").text == "x"
    growth = push(output, "N")
    assert (growth.text, growth.finish) == ("EN", Finish(FinishReason.LENGTH))
    output = output_of(stop=("END",), eos_token_ids=(END_ID,))
    push(output, "xE")
    assert push(output, (END_ID,)).text == "E"


def test_text_held_back_comes_before_the_stop_tokens_own() -> None:
    (b,) = ids("b")
    output = output_of(stop=("END",), stop_token_ids=(b,), include_stop=True)
    push(output, "xE")
    assert push(output, "b").text == "Eb"


def test_an_unfinished_character_at_the_end_is_marked() -> None:
    output = output_of(max_tokens=2)
    assert push(output, ids("中")[:2]).text == "\ufffd"


def test_the_stop_on_the_last_token_is_a_stop() -> None:
    growth = push(output_of(stop=("c",), max_tokens=3), "abc")
    assert growth.finish == Finish(FinishReason.STOP, "c")


def test_stop_texts_wait_for_min_tokens() -> None:
    output = output_of(stop=("aa",), sampling=SamplingParams(min_tokens=4))
    assert push(output, "aaaa").finish is None
    assert push(output, "ba").finish is None
    assert push(output, "a").finish == Finish(FinishReason.STOP, "aa")
    assert output.text == "aaaab"


def test_logprobs_are_cut_with_the_tokens() -> None:
    entries = tuple(TokenLogprob(token, -1.0, 1) for token in ids("abc"))
    output = output_of(max_tokens=2, num_logprobs=0)
    assert output.push(ids("abc"), entries) == (2, Finish(FinishReason.LENGTH))
    assert output.logprobs == entries[:2]


def test_closing_gives_out_what_was_held_back() -> None:
    output = output_of(stop=("END",))
    push(output, "xEN")
    output.close()
    assert output.take_text() == "EN"
    assert output.text == "xEN"


def test_text_is_taken_once_however_many_steps_it_comes_from() -> None:
    output = output_of()
    for text in ("a", "b", "é"):
        output.push(ids(text), None)
    assert (output.take_text(), output.take_text(), output.text) == ("abé", "", "abé")


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = Output(make_plan(vocab_size=300, max_tokens=2), None)
    growth = push(output, (1, 2, 3))
    assert (growth.text, growth.token_ids) == ("", (1, 2))
