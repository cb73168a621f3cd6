"""Text and statistics of a user: text, stops, ends, logprobs and penalties, through the whole stack."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.generation import GenerationResult
from outrider.types import FinishReason, TokenLogprob
from tests.end_to_end.parrot import END, build_parrot, token_ids_of
from tests.end_to_end.waiting import Reader, all_free
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model, load_reference

TEXT = "ab é-世_👋.cdefgh"
THEN = "XYZ"
WIDTHS = pytest.mark.parametrize("draft_length", [0, 4])
MODEL = cached_tiny_model("qwen2", seed=4)
NUM_TOKEN_IDS = 257  # the rows after it are padding
PROMPT = [72, 101, 108, 108, 111, 72, 101]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_parrot(tmp_path_factory.mktemp("parrot"), TEXT, then=THEN)


@asynccontextmanager
async def stack_of(folder: Path) -> AsyncIterator[Stack]:
    async with run_stack(folder, folder, wire=True, draft_timeout_ms=60_000) as stack:
        yield stack
        await all_free(stack)


async def say(folder: Path, **options: Any) -> GenerationResult:
    """The result of a stream that said the same, piece by piece."""
    async with stack_of(folder) as stack:
        return await said(stack, **options)


async def said(stack: Stack, **options: Any) -> GenerationResult:
    """The same on a stack that other requests use."""
    reader = Reader(stack, **{"prompt": TEXT[0], "temperature": 0, "max_tokens": 60, **options})
    last = await reader.finish()
    assert last.result is not None
    assert (reader.text, reader.token_ids) == (last.result.text, last.result.token_ids)
    return last.result


# Characters.


@WIDTHS
async def test_characters_spread_over_tokens_come_whole(parrot: Path, draft_length: int) -> None:
    result = await say(parrot, num_speculative_tokens=draft_length)
    assert result.text == TEXT[1:]
    assert result.finish_reason is FinishReason.STOP
    assert result.matched_stop == END
    assert result.token_ids == (*token_ids_of(parrot, TEXT)[1:], END)
    assert (result.speculation.num_accepted_tokens > 10) == (draft_length > 0)


async def test_a_character_comes_with_its_last_token_and_not_before(parrot: Path) -> None:
    async with stack_of(parrot) as stack:
        reader = Reader(stack, prompt="_", temperature=0, max_tokens=5, num_speculative_tokens=0)
        await reader.finish()
    # The last delta carries the result with the fifth token.
    assert [delta.text for delta in reader.deltas if delta.token_ids or delta.text] == ["", "", "", "👋", "."]


async def test_a_character_cut_off_by_the_length_is_marked(parrot: Path) -> None:
    result = await say(parrot, prompt="_", max_tokens=2)
    assert result.finish_reason is FinishReason.LENGTH
    assert set(result.text) == {"\ufffd"}


async def test_a_prompt_may_end_inside_a_character(parrot: Path) -> None:
    half = token_ids_of(parrot, "_👋")[:3]
    result = await say(parrot, prompt=None, prompt_token_ids=half, max_tokens=3)
    assert result.text == "👋."


# Stops.


STOPS: list[tuple[list[str], str, str | int]] = [
    (["ef"], "cd", "ef"),
    (["gh", "def"], "c", "def"),
    (["efX", "h"], "cdefg", "h"),
    (["f", "ef", "cdefgh"], "cd", "ef"),
    (["👋"], "", "👋"),
    (["世_"], "", "世_"),
    (["nothing of it", "cX"], "cdefgh", END),
]
"""Stop texts, what is shown before one, and the one that is found."""


@WIDTHS
async def test_stop_texts_are_found_across_tokens(parrot: Path, draft_length: int) -> None:
    async with stack_of(parrot) as stack:
        for (stop, shown, matched), include in itertools.product(STOPS, (False, True)):
            begins = {"👋": "_", "世_": "-"}.get(str(matched), ".")
            result = await said(
                stack,
                prompt=begins,
                stop=stop,
                include_stop_str_in_output=include,
                num_speculative_tokens=draft_length,
            )
            assert result.finish_reason is FinishReason.STOP
            assert result.matched_stop == matched
            assert result.text == shown + (matched if include and isinstance(matched, str) else "")
            # The tokens go up to the one that completed the stop.
            full = TEXT[TEXT.index(begins) + 1 :]
            end = full.index(matched) + len(matched) if isinstance(matched, str) else len(full)
            assert result.token_ids == (*token_ids_of(parrot, full[:end]), *((END,) if matched == END else ()))


@WIDTHS
async def test_stop_token_ids_end_without_their_text(parrot: Path, draft_length: int) -> None:
    (token_id,) = token_ids_of(parrot, "e")
    common = {"prompt": ".", "stop_token_ids": [token_id], "num_speculative_tokens": draft_length}
    result = await say(parrot, **common)
    assert (result.text, result.matched_stop, result.finish_reason) == ("cd", token_id, FinishReason.STOP)
    assert result.token_ids == tuple(token_ids_of(parrot, "cde"))
    shown = await say(parrot, **common, include_stop_str_in_output=True)
    assert shown.text == "cde"


@WIDTHS
async def test_every_end_of_generation_config_counts(tmp_path: Path, draft_length: int) -> None:
    folder = build_parrot(tmp_path / "model", TEXT, then=THEN)
    (other,) = token_ids_of(folder, "f")
    build_parrot(tmp_path / "model", TEXT, then=THEN, eos_token_ids=[END, other])
    common = {"prompt": ".", "num_speculative_tokens": draft_length}
    result = await say(folder, **common)
    assert (result.text, result.matched_stop) == ("cde", other)
    further = await say(folder, prompt="f", num_speculative_tokens=draft_length)
    assert (further.text, further.matched_stop) == ("gh", END)
    ignoring = await say(folder, **common, ignore_eos=True, max_tokens=9)
    assert ignoring.finish_reason is FinishReason.LENGTH
    assert ignoring.token_ids == (*token_ids_of(folder, "cdefgh"), END, *token_ids_of(folder, "XY"))
    assert ignoring.text == "cdefghXY"


@WIDTHS
async def test_no_end_comes_before_min_tokens(parrot: Path, draft_length: int) -> None:
    common = {"prompt": "g", "num_speculative_tokens": draft_length, "max_tokens": 8}
    assert (await say(parrot, **common)).token_ids == (*token_ids_of(parrot, "h"), END)
    later = await say(parrot, **common, min_tokens=5)
    assert len(later.token_ids) >= 5
    assert END not in later.token_ids[:5]


async def test_a_stop_text_before_min_tokens_does_not_count(parrot: Path) -> None:
    for min_tokens, shown, matched in ((1, "c", "d"), (2, "cdefgh", END)):  # as in vLLM
        result = await say(parrot, prompt=".", stop=["d"], min_tokens=min_tokens)
        assert (result.text, result.matched_stop) == (shown, matched)


# What is told of tokens, and what changes them: against the model itself.


@functools.cache
def reference() -> PreTrainedModel:
    return load_reference(MODEL)


def model_says(token_ids: Sequence[int]) -> Tensor:  # -> [len(token_ids), V]
    with torch.no_grad():
        logits: Tensor = reference()(torch.tensor([list(token_ids)])).logits[0]
    return logits


def check_logprob(entry: TokenLogprob, token_id: int, logits: Tensor, num_top: int) -> None:  # logits [V]
    logprobs = logits.log_softmax(-1)
    known = logprobs[:NUM_TOKEN_IDS]
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-4)
    assert entry.rank == 1 + int((known > known[token_id]).sum())
    values, ids = known.topk(num_top)
    assert [top_id for top_id, _ in entry.top] == ids.tolist()
    assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("draft_length", "temperature"), [(0, 1.0), (4, 0.0), (4, 1.0)])
async def test_logprobs_are_those_of_the_model(draft_length: int, temperature: float) -> None:
    prompt = [*range(40, 70)]
    async with stack_of(MODEL) as stack:
        result = await stack.generate(
            prompt_token_ids=prompt,
            max_tokens=20,
            temperature=temperature,
            top_k=8,  # what is told is the model's own, before it
            ignore_eos=True,
            seed=3,
            logprobs=4,
            prompt_logprobs=3,
            num_speculative_tokens=draft_length,
        )
    logits = model_says((*prompt, *result.token_ids))
    assert result.logprobs is not None and result.prompt_logprobs is not None
    assert len(result.logprobs) == 20
    for index, (entry, token_id) in enumerate(zip(result.logprobs, result.token_ids, strict=True)):
        check_logprob(entry, token_id, logits[len(prompt) - 1 + index], 4)
    assert result.prompt_logprobs[0] is None
    for index, (told, token_id) in enumerate(zip(result.prompt_logprobs[1:], prompt[1:], strict=True)):
        assert told is not None
        check_logprob(told, token_id, logits[index], 3)


async def test_nothing_is_told_unasked() -> None:
    async with stack_of(MODEL) as stack:
        result = await stack.generate(prompt_token_ids=PROMPT, max_tokens=4)
    assert result.logprobs is None
    assert result.prompt_logprobs is None


Change = Callable[[Tensor, Sequence[int]], None]
"""Changes the logits [V] of the token after prompt and output, given the output."""


def plain_loop(max_tokens: int, change: Change) -> list[int]:
    """One token after another, from the whole text each time, as the papers and manuals say it."""
    output: list[int] = []
    for _ in range(max_tokens):
        logits = model_says((*PROMPT, *output))[-1].clone()
        logits[NUM_TOKEN_IDS:] = -torch.inf
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def repetition(penalty: float) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        for token_id in {*PROMPT, *output}:
            logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty

    return change


def counted(frequency: float, presence: float) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        for token_id in output:
            logits[token_id] -= frequency
        for token_id in set(output):
            logits[token_id] -= presence

    return change


def one_after_another(*changes: Change) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        for each in changes:
            each(logits, output)

    return change


def nothing(logits: Tensor, output: Sequence[int]) -> None:
    """Result as the model says."""


def biased(bias: dict[int, float]) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        for token_id, value in bias.items():
            logits[token_id] += value

    return change


def only(allowed: Sequence[int]) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        kept = logits[list(allowed)].clone()
        logits.fill_(-torch.inf)
        logits[list(allowed)] = kept

    return change


def without_runs(*runs: Sequence[int]) -> Change:
    def change(logits: Tensor, output: Sequence[int]) -> None:
        for run in runs:
            if list(output[len(output) - len(run) + 1 :]) == list(run[:-1]) and len(output) >= len(run) - 1:
                logits[run[-1]] = -torch.inf

    return change


BIAS = {5: 6.0, 100: 4.0, 200: -100.0, 256: 5.0}
CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "plain": ({}, nothing),
    "repetition": ({"repetition_penalty": 1.4}, repetition(1.4)),
    "encouraged repetition": ({"repetition_penalty": 0.8}, repetition(0.8)),
    "frequency and presence": ({"frequency_penalty": 0.9, "presence_penalty": 0.7}, counted(0.9, 0.7)),
    "negative": ({"frequency_penalty": -0.8, "presence_penalty": -1.0}, counted(-0.8, -1.0)),
    "all three": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.4},
        one_after_another(repetition(1.2), counted(0.5, 0.4)),
    ),
    "bias": ({"logit_bias": BIAS}, biased(BIAS)),
    "allowed": ({"allowed_token_ids": [3, 50, 51, 52, 60]}, only([3, 50, 51, 52, 60])),
    "bias and penalties": (
        {"logit_bias": BIAS, "presence_penalty": 1.5},
        one_after_another(biased(BIAS), counted(0.0, 1.5)),
    ),
}


async def greedy(stack: Stack, draft_length: int, **options: Any) -> GenerationResult:
    """24 tokens after the prompt."""
    return await stack.generate(
        prompt_token_ids=PROMPT,
        max_tokens=24,
        temperature=0,
        ignore_eos=True,
        num_speculative_tokens=draft_length,
        **options,
    )


async def test_what_shapes_logits_equals_a_plain_loop() -> None:
    unchanged = plain_loop(24, nothing)
    async with stack_of(MODEL) as stack:
        for case, (options, change) in CASES.items():
            expected = plain_loop(24, change)
            assert (expected != unchanged) == (case != "plain")
            for draft_length in (0, 4):
                result = await greedy(stack, draft_length, **options)
                assert list(result.token_ids) == expected, case


async def test_bad_words_are_never_completed() -> None:
    printable = list(range(94))  # the tiny models' ids of "!" to "~"
    allowed = only(printable)
    free = plain_loop(24, allowed)
    words = ["".join(chr(33 + token_id) for token_id in free[2:5]), chr(33 + free[8])]
    space = token_ids_of(MODEL, " ")
    runs = [token_ids_of(MODEL, word) for word in words]
    change = one_after_another(allowed, without_runs(*runs, *([*space, *run] for run in runs)))
    expected = plain_loop(24, change)
    assert expected != free
    async with stack_of(MODEL) as stack:
        for draft_length in (0, 4):
            result = await greedy(stack, draft_length, allowed_token_ids=printable, bad_words=words)
            assert list(result.token_ids) == expected
            assert not any(word in result.text for word in words)
