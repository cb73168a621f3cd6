"""Stop texts under every kind of tokenizer: a generation ends with the token whose text completes one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider.tokenization import REPLACEMENT, TextTokenizer
from outrider.types import FinishReason, SamplingParams
from outrider_coordinator.session.actions import Finish
from outrider_coordinator.session.output import Output
from tests.coordinator.driving import make_plan
from tests.coordinator.text.test_detokenize import Case, random_case, text_of
from tests.coordinator.text.tokenizer_kinds import KINDS, llama_2

NUM_CASES = 40


def run(tokenizer: TextTokenizer, case: Case, stop: str, *, min_tokens: int = 0) -> tuple[int, str, Finish | None]:
    """(tokens up to the end, text, ending) of an output."""
    request = make_plan(
        vocab_size=1000,
        prompt=case.prompt,
        max_tokens=1000,
        stop=(stop,),
        skip_special_tokens=case.skips,
        sampling=SamplingParams(min_tokens=min_tokens),
    )
    output = Output(request, tokenizer)
    for count, token_id in enumerate(case.output, start=1):
        _, finish = output.push([token_id], None)
        if finish is not None:
            return count, output.text, finish
    output.close()
    return len(case.output), output.text, None


def expected(tokenizer: TextTokenizer, case: Case, stop: str) -> tuple[int, str, Finish | None]:
    for count in range(1, len(case.output) + 1):
        text = text_of(tokenizer, case, count).rstrip(REPLACEMENT)
        if stop in text:
            return count, text[: text.index(stop)], Finish(FinishReason.STOP, stop)
    return len(case.output), text_of(tokenizer, case), None


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_ends_the_output_at_its_token(kind: Callable[[], TextTokenizer]) -> None:
    tokenizer, draw, num_found = kind(), random.Random(kind.__name__), 0
    for _ in range(NUM_CASES):
        case = random_case(tokenizer, draw, skips=draw.random() < 0.5)
        text = text_of(tokenizer, case).replace(REPLACEMENT, "")
        begin = draw.randrange(len(text) + 1)
        stop = text[begin : begin + draw.choice((1, 2, 5))] or "中"
        found = run(tokenizer, case, stop)
        assert found == expected(tokenizer, case, stop)
        num_found += found[2] is not None
    assert num_found > NUM_CASES / 4


def test_a_stop_text_seen_before_min_tokens_does_not_end_it_later() -> None:
    tokenizer = llama_2()
    newline, word = (tokenizer.backend.token_to_id(token) for token in ("<0x0A>", "world"))
    assert newline is not None
    assert word is not None
    case = Case((word,), (newline, word, newline), skips=True)
    assert run(tokenizer, case, "\n") == (1, "", Finish(FinishReason.STOP, "\n"))
    assert run(tokenizer, case, "\n", min_tokens=1) == (3, "\nworld", Finish(FinishReason.STOP, "\n"))
