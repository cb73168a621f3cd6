"""A generation that goes on from output that was given out before: as if it had never been interrupted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import InvalidRequestError
from outrider.generation import Delta, GenerationRequest, GenerationResult, Resumption
from outrider.types import AcceptanceMethod, FinishReason, SamplingParams
from outrider_coordinator.requests.output_collector import OutputCollector
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.output import Output
from tests.coordinator.driving import make_plan
from tests.coordinator.setting import METHODS, Setting, mixed_rows, own_tokens, plan_of
from tests.coordinator.test_service import ROWS, ask, eventually, stack
from tests.coordinator.tokenizers_for_tests import byte_level, text_tokenizer
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyTarget, random_rows

TOKENIZER = text_tokenizer(byte_level())
COUPLED = AcceptanceMethod.COUPLED


# The text across the seam.


def text_plan(**fields: Any) -> EngineRequest:
    return make_plan(vocab_size=300, **{"max_tokens": 400, **fields})


def given_out(plan: EngineRequest, token_ids: Sequence[int], *, cut: int | None = None) -> tuple[list[str], object]:
    """The texts of one token after the other, and the end; with a cut, of two outputs that never met."""
    output = Output(plan, TOKENIZER)
    texts: list[str] = []
    finish: object = None
    for count, token_id in enumerate(token_ids):
        if count == cut:
            output = Output(plan, TOKENIZER)
            assert output.replay(token_ids[:count]) is None
        _, finish = output.push((token_id,), None)
        texts.append(output.take_text(None if finish else count + 1))
        if finish is not None:
            break
    assert output.text == "".join(texts)
    return texts, finish


@pytest.mark.parametrize("seed", range(12))
def test_every_cut_gives_out_the_same_text_token_by_token(seed: int) -> None:
    """Characters of several bytes, broken ones, stop texts that almost come and one that does."""
    drawn = random.Random(seed)
    pieces = ["E", "EN", "xEN", "中", "é", "🙂", "a", " ", "STO"]
    text = "".join(drawn.choices(pieces, k=20)) + "END"
    token_ids = list(TOKENIZER.encode_prompt(text))
    for _ in range(3):  # bytes that are lost leave characters that never become whole
        del token_ids[drawn.randrange(len(token_ids) - 3)]
    prompt = TOKENIZER.encode_prompt("中")[: drawn.randrange(1, 4)]
    plan = text_plan(
        prompt=prompt,
        stop=("END", "STOP🙂", "中é"),
        include_stop=drawn.random() < 0.5,
        sampling=SamplingParams(min_tokens=drawn.choice([0, 10])),
    )
    whole = given_out(plan, token_ids)
    for cut in range(1, len(whole[0])):
        assert given_out(plan, token_ids, cut=cut) == whole, cut


def test_text_held_back_at_the_cut_comes_with_the_end() -> None:
    plan = text_plan(stop=("END",), max_tokens=3)
    token_ids = TOKENIZER.encode_prompt("xEN")
    output = Output(plan, TOKENIZER)
    assert output.replay(token_ids[:2]) is None
    _, finish = output.push(token_ids[2:], None)
    assert (output.take_text(), output.text) == ("EN", "xEN")
    assert finish is not None and finish.reason is FinishReason.LENGTH


def test_output_that_goes_on_past_its_end_is_refused() -> None:
    plan = text_plan(stop=("b",))
    with pytest.raises(InvalidRequestError, match="after the token at 1") as caught:
        Output(plan, TOKENIZER).replay(TOKENIZER.encode_prompt("abc"))
    assert caught.value.field == "resume.emitted_token_ids"


def push(output: Output, collector: OutputCollector, text: str) -> None:
    """A step that gave the tokens of this text."""
    token_ids = TOKENIZER.encode_prompt(text)
    output.push(token_ids, None)
    collector.put(token_ids)


async def test_text_never_runs_ahead_of_its_tokens() -> None:
    """A request that resumes from the ids of a delta has received the text of those ids and no other."""
    plan = text_plan()
    output = Output(plan, TOKENIZER)
    collector = OutputCollector(output.take_text)
    push(output, collector, "ab")
    collector.release()
    push(output, collector, "cd")  # the next step, which is not released
    deltas = collector.deltas()
    assert (await anext(deltas)).text == "ab"
    collector.release()
    assert (await anext(deltas)).text == "cd"


# The session.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_greedy_and_coupled_tokens_are_those_of_an_undisturbed_session(
    method: AcceptanceMethod, temperature: float
) -> None:
    if temperature and method is not COUPLED:
        pytest.skip("exact in distribution: tests/coordinator/session/test_resumed_distribution.py")
    plan = plan_of(method=method, temperature=temperature, seed=5)
    whole = own_tokens(plan)
    for cut in range(1, len(whole)):
        setting = Setting(draft_rows=mixed_rows)
        driven = setting.run(replace(plan, emitted_token_ids=tuple(whole[:cut])))
        assert [*whole[:cut], *driven.token_ids] == whole, cut
        assert driven.loop.tokens.output == tuple(whole)
        assert setting.scores[0].token_ids == (*plan.prompt_token_ids, *whole[:cut])
        assert {opened.prompt_length for opened in opens(setting)} == {len(plan.prompt_token_ids)}
        assert {opened.max_length for opened in opens(setting)} == {plan.max_length}


def opens(setting: Setting) -> list[Any]:
    sent = (*setting.bench.sent_to_target, *setting.bench.sent_to_draft)
    return [command for command in sent if hasattr(command, "prompt_length")]


@pytest.mark.parametrize("num_prompt_logprobs", [None, 1])
def test_output_that_had_ended_ends_again_and_generates_nothing(num_prompt_logprobs: int | None) -> None:
    plan = plan_of(temperature=0.0, max_tokens=6, num_prompt_logprobs=num_prompt_logprobs)
    whole = own_tokens(replace(plan, num_prompt_logprobs=None))
    setting = Setting()
    driven = setting.run(replace(plan, emitted_token_ids=tuple(whole)))
    assert driven.ending is not None
    assert getattr(driven.ending, "reason", None) is FinishReason.LENGTH
    assert (driven.token_ids, driven.loop.tokens.output) == ([], tuple(whole))
    assert driven.loop.spec_stats.num_steps == 0
    assert len(setting.scores) == (num_prompt_logprobs is not None)
    if num_prompt_logprobs is not None:
        assert driven.loop.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in driven.loop.prompt_logprobs] == [None, 2, 3]
    assert setting.all_is_free()


# The coordinator.


async def deltas_of(request: GenerationRequest, **settings: Any) -> list[Delta]:
    async with stack(**settings) as made:
        return [delta async for delta in made.coordinator.generate_stream(request)]


def result_of(deltas: list[Delta]) -> GenerationResult:
    assert deltas[-1].result is not None
    return deltas[-1].result


async def test_a_resumable_stream_says_first_what_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_coordinator.requests.request_state.PROGRESS_INTERVAL_S", 0.0)
    first, *rest = await deltas_of(
        ask(resumable=True, max_tokens=1000), target=ToyTarget(ROWS, 8, max_model_len=60), acceptance_method="coupled"
    )
    assert first.started is not None and (first.text, first.token_ids) == ("", ())
    result = result_of(rest)
    assert first.started.seed == result.seed
    assert first.started.request_id == result.request_id
    assert first.started.max_tokens == len(result.token_ids) < 1000
    assert first.started.acceptance_method is COUPLED
    assert first.started.prompt_token_ids is None
    assert first.started.num_emitted_tokens == 0
    assert first.started.model == "toy-target"
    assert all(delta.started is None and delta.progress is not None for delta in rest)
    progress = rest[-1].progress
    assert progress is not None and progress.speculation == result.speculation


async def test_how_far_a_call_is_comes_with_its_first_output_and_then_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_coordinator.requests.request_state.PROGRESS_INTERVAL_S", 3600.0)
    _, first, *rest = await deltas_of(ask(resumable=True, max_tokens=20))
    assert first.progress is not None and first.progress.speculation.num_steps > 0
    assert rest and all(delta.progress is None for delta in rest)


async def test_a_stream_that_is_not_to_be_resumable_says_neither() -> None:
    deltas = await deltas_of(ask())
    assert all(delta.started is None and delta.progress is None for delta in deltas)


async def test_a_prompt_of_text_is_told_as_ids() -> None:
    tokenizer = byte_level()
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    target = ToyTarget(random_rows(tokenizer.get_vocab_size()), tokenizer.get_vocab_size(), tokenizer_files=files)
    request = ask(prompt="héllo", prompt_token_ids=None, resumable=True, max_tokens=2)
    first, *_ = await deltas_of(request, target=target, has_draft=False)
    assert first.started is not None
    assert first.started.prompt_token_ids == TOKENIZER.encode_prompt("héllo")


async def test_logprobs_usage_and_progress_across_the_seam() -> None:
    asked = ask(seed=3, temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=20)
    whole = result_of(await deltas_of(asked))
    resume = Resumption(whole.token_ids[:7], "toy-target")
    deltas = await deltas_of(replace(asked, resumable=True, resume=resume))
    result = result_of(deltas)
    assert deltas[0].started is not None and deltas[0].started.num_emitted_tokens == 7
    assert whole.token_ids[7:] == sum((delta.token_ids for delta in deltas), ())
    assert (result.token_ids, result.usage, result.seed) == (whole.token_ids, whole.usage, whole.seed)
    assert (result.finish_reason, result.matched_stop) == (whole.finish_reason, whole.matched_stop)
    assert whole.logprobs is not None
    assert result.logprobs == whole.logprobs[7:]
    assert result.prompt_logprobs == whole.prompt_logprobs


async def test_a_long_output_is_read_without_holding_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_coordinator.service.LONG_OUTPUT_TOKENS", 3)
    asked = ask(temperature=0.0)
    whole = result_of(await deltas_of(asked))
    deltas = await deltas_of(replace(asked, seed=whole.seed, resume=Resumption(whole.token_ids[:5])))
    assert result_of(deltas).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("field", "words", "fields"),
    [
        ("resume.emitted_token_ids", "from 0 to 7", {"resume": Resumption((1, 8))}),
        ("resume.emitted_token_ids", "at most max_tokens 24", {"resume": Resumption((1,) * 25)}),
        ("resume.emitted_token_ids", "at most", {"max_tokens": 10_000, "resume": Resumption((1,) * 9_000)}),
        ("resume.emitted_token_ids", "after the token at 0", {"stop_token_ids": (5,), "resume": Resumption((5, 1))}),
        ("resume.model", "'other'", {"resume": Resumption((1,), "other")}),
        ("seed", "interrupted", {"seed": None, "resume": Resumption((1,))}),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused_by_name(field: str, words: str, fields: dict[str, Any]) -> None:
    async with stack() as made:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await made.run(ask(**{"seed": 1, **fields}))
        assert caught.value.field == field
        assert (await made.run(ask(max_tokens=2))).finish_reason is FinishReason.LENGTH


async def test_a_resumed_request_may_wait_be_cancelled_and_frees_all() -> None:
    async with stack(max_running_requests=1) as made:
        first = made.coordinator.generate_stream(ask(max_tokens=24))
        await anext(first)
        resumed = made.coordinator.generate_stream(ask(seed=1, resumable=True, resume=Resumption((1, 2))))
        assert (await anext(resumed)).started is not None  # at once, whoever runs
        assert stats_of(made.coordinator).num_waiting == 1
        await resumed.aclose()
        await first.aclose()
        await eventually(made.is_free)
        assert stats_of(made.coordinator).num_waiting == 0


async def test_resumed_requests_are_counted_and_their_times_are_of_new_tokens() -> None:
    async with stack(has_draft=False) as made:
        whole = await made.run(ask(temperature=0.0))
        resume = Resumption(whole.token_ids[:20])
        assert [delta async for delta in made.coordinator.generate_stream(ask(temperature=0.0, seed=1, resume=resume))]
        readings = {reading.name: reading.value for reading in made.coordinator.readings() if not reading.labels}
        assert readings["outrider_requests_resumed_total"] == 1
        assert readings["outrider_prompt_tokens_total"] == 2 * len((1, 2, 3))
        assert readings["outrider_spec_decode_num_emitted_tokens_total"] == 24 + 4
