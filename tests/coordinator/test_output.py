"""What ends a generation, token by token, and what is given out."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.actions import Finish
from coordinator.output import Growth, Output
from outrider.types import FinishReason, SamplingParams, TokenLogprob
from tests.coordinator.driving import make_plan
from tests.coordinator.tokenizers_for_tests import END, byte_level, text_tokenizer

TOKENIZER = text_tokenizer(byte_level())
END_ID = int(byte_level().token_to_id(END) or 0)


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode_prompt(text)


def output_of(**fields: Any) -> Output:
    return Output(make_plan(vocab_size=300, **{"max_tokens": 100, **fields}), TOKENIZER)


def push(output: Output, text: str) -> Growth:
    return output.push(ids(text), None)


def test_text_and_tokens_grow() -> None:
    output = output_of()
    assert push(output, "ab").emit.text == "ab"
    assert push(output, "é").emit.token_ids == ids("é")
    assert output.text == "abé"
    assert output.num_remaining == 96


def test_the_length_ends_it_and_drops_the_rest() -> None:
    growth = push(output_of(max_tokens=3), "abcdef")
    assert (growth.emit.text, growth.emit.token_ids) == ("abc", ids("abc"))
    assert growth.finish == Finish(FinishReason.LENGTH)


def test_an_end_of_sequence_is_a_token_without_text() -> None:
    growth = output_of(eos_token_ids=(END_ID,)).push((*ids("ab"), END_ID, *ids("cd")), None)
    assert growth.emit.token_ids == (*ids("ab"), END_ID)
    assert growth.emit.text == "ab"
    assert growth.finish == Finish(FinishReason.STOP, END_ID)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_tokens_text_is_kept_only_when_asked_for(include: bool, text: str) -> None:
    (b,) = ids("b")
    growth = push(output_of(stop_token_ids=(b,), include_stop=include), "abc")
    assert (growth.emit.text, growth.finish) == (text, Finish(FinishReason.STOP, b))


def test_a_stop_text_across_tokens_drops_what_follows() -> None:
    output = output_of(stop=("END",))
    assert push(output, "xE").emit.text == "x"
    growth = push(output, "NDyz")
    assert growth.emit.token_ids == ids("ND")
    assert (growth.emit.text, growth.finish) == ("", Finish(FinishReason.STOP, "END"))
    assert output.text == "x"


def test_a_stop_text_may_be_kept() -> None:
    output = output_of(stop=("END",), include_stop=True)
    push(output, "xEN")
    assert push(output, "Dy").emit.text == "END"


def test_held_back_text_comes_with_the_end() -> None:
    output = output_of(stop=("END",), max_tokens=3)
    assert push(output, "xE").emit.text == "x"
    growth = push(output, "N")
    assert (growth.emit.text, growth.finish) == ("EN", Finish(FinishReason.LENGTH))
    output = output_of(stop=("END",), eos_token_ids=(END_ID,))
    push(output, "xE")
    assert output.push((END_ID,), None).emit.text == "E"


def test_text_held_back_comes_before_the_stop_tokens_own() -> None:
    (b,) = ids("b")
    output = output_of(stop=("END",), stop_token_ids=(b,), include_stop=True)
    push(output, "xE")
    assert push(output, "b").emit.text == "Eb"


def test_an_unfinished_character_at_the_end_is_marked() -> None:
    output = output_of(max_tokens=2)
    assert output.push(ids("中")[:2], None).emit.text == "\ufffd"


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
    assert output.push(ids("abc"), entries).emit.logprobs == entries[:2]
    assert output.logprobs == entries[:2]


def test_closing_gives_out_what_was_held_back() -> None:
    output = output_of(stop=("END",))
    push(output, "xEN")
    assert output.close().text == "EN"
    assert output.text == "xEN"


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = Output(make_plan(vocab_size=300, max_tokens=2), None)
    growth = output.push((1, 2, 3), None)
    assert (growth.emit.text, growth.emit.token_ids) == ("", (1, 2))
