"""The coordinator in process, over toy services with real links: streams, timers, links that break, queues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.chat import ChatPrompt
from outrider.config import CoordinatorSettings
from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NonFiniteLogitsError,
    PairMismatchError,
    UnavailableError,
)
from outrider.generation import Delta, GenerationRequest, GenerationResult
from outrider.types import AcceptanceMethod, FinishReason, Grammar, GrammarKind, SamplingParams
from outrider_coordinator.requests.input_processor import InputProcessor, Tokenized
from outrider_coordinator.service import Coordinator
from outrider_coordinator.session.output import Output
from outrider_coordinator.threads import MOST_THREADS
from tests.coordinator.tokenizers_for_tests import byte_level, text_tokenizer
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows
from tests.support.toy_models import ToyDraftCore

VOCAB_SIZE = 8
ROWS = random_rows(VOCAB_SIZE, seed=1)
COUPLED = AcceptanceMethod.COUPLED
SOON_S = 240.0


def ask(**fields: Any) -> GenerationRequest:
    temperature = fields.pop("temperature", 1.0)
    defaults: dict[str, Any] = {"prompt_token_ids": (1, 2, 3), "max_tokens": 24}
    return GenerationRequest(sampling=SamplingParams(temperature=temperature), **(defaults | fields))


def settings_of(**fields: Any) -> CoordinatorSettings:
    # A draft is given up by tests that say so, not by a busy machine; lengths are chosen in tests of that.
    fixed: dict[str, Any] = {"draft_timeout_ms": 60_000, "draft_length": "fixed", "num_speculative_tokens": 4}
    return CoordinatorSettings(**(fixed | fields))


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():
            await asyncio.sleep(0.001)


async def complete(coordinator: Coordinator, request: GenerationRequest, **arguments: Any) -> GenerationResult:
    deltas = [delta async for delta in coordinator.generate_stream(request, **arguments)]
    assert [delta.result is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    result = deltas[-1].result
    assert result is not None
    assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
    assert "".join(delta.text for delta in deltas) == result.text
    return result


class Stack:
    """A coordinator and its toys."""

    def __init__(self, target: ToyTarget, draft: ToyDraft | None, settings: CoordinatorSettings) -> None:
        self.target, self._draft = target, draft
        self.target_ups: list[bool] = []
        self.coordinator = Coordinator(target, draft, settings, on_target=self.target_ups.append)

    @property
    def draft(self) -> ToyDraft:
        assert self._draft is not None
        return self._draft

    def is_free(self) -> bool:
        """True if neither service holds a page."""
        toys: list[ToyTarget | ToyDraft] = [self.target, *([self._draft] if self._draft else [])]
        return all(toy.num_pages_free == toy.description.num_pages for toy in toys)

    async def run(self, request: GenerationRequest, **arguments: Any) -> GenerationResult:
        async with asyncio.timeout(SOON_S):
            return await complete(self.coordinator, request, **arguments)


@contextlib.asynccontextmanager
async def stack(
    *, target: ToyTarget | None = None, draft: ToyDraft | None = None, has_draft: bool = True, **settings: Any
) -> AsyncIterator[Stack]:
    target = target or ToyTarget(ROWS, VOCAB_SIZE)
    draft = (draft or ToyDraft(ROWS, VOCAB_SIZE)) if has_draft else None
    made = Stack(target, draft, settings_of(**settings))
    async with asyncio.timeout(SOON_S):
        await made.coordinator.start()
    try:
        yield made
    finally:
        await made.coordinator.close()
    assert made.is_free()


async def own_tokens(request: GenerationRequest) -> tuple[int, ...]:
    async with stack(has_draft=False) as alone:
        return (await alone.run(request)).token_ids


async def test_a_generation_and_its_result() -> None:
    async with stack() as made:
        result = await made.run(ask(seed=3, request_id="mine", logprobs=1, prompt_logprobs=0))
        assert (result.seed, result.request_id, result.finish_reason) == (3, "mine", FinishReason.LENGTH)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 24)
        assert result.speculation.num_accepted_tokens > 10
        assert result.speculation.mean_acceptance_length > 3
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        assert result.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in result.prompt_logprobs] == [None, 2, 3]
        await eventually(made.is_free)
        stats = stats_of(made.coordinator)
        assert (stats.num_finished, stats.num_running, stats.spec_stats.num_emitted_tokens) == (1, 0, 24)


async def test_times_are_intervals_that_fit_into_the_whole() -> None:
    async with stack() as made:
        timing = (await made.run(ask(max_tokens=100))).timing
    parts = (timing.draft, timing.target, timing.accept, timing.wire)
    assert min(parts) > 0
    assert sum(parts) <= timing.total - timing.queue
    assert 0 <= timing.queue <= timing.first_token <= timing.total


async def test_a_grammar_that_may_be_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def tokenize(_: InputProcessor, request: GenerationRequest, rendered: str) -> Tokenized:
        grammar = request.sampling.grammar
        assert grammar is not None and not rendered
        if "multipleOf" in grammar.text:
            may_end.wait(SOON_S)
        raise InvalidRequestError("grammar", "was compiled")

    monkeypatch.setattr(InputProcessor, "tokenize", tokenize)
    async with stack() as made:

        async def compiled(text: str) -> None:
            sampling = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, text))
            with pytest.raises(InvalidRequestError, match="was compiled"):
                await made.run(replace(ask(), sampling=sampling))

        slow = [asyncio.create_task(compiled('{"multipleOf": 9973}')) for _ in range(2 * MOST_THREADS)]
        await asyncio.sleep(0)
        await compiled("{}")
        assert not any(task.done() for task in slow)
        may_end.set()
        await asyncio.gather(*slow)


async def test_sixteen_sessions_share_messages() -> None:
    """One forward a step for all of them, not one for each."""
    async with stack() as made:
        requests = [ask(max_tokens=41, seed=seed) for seed in range(16)]
        results = await asyncio.gather(*(made.run(request) for request in requests))
        assert {result.speculation.num_steps for result in results} == {9}
        assert made.target.num_forwards == 9
        assert made.draft.num_forwards == 9


async def test_coupled_gives_the_same_tokens_whatever_the_draft_does() -> None:
    request = ask(acceptance_method=COUPLED, seed=5, max_tokens=60)
    expected = await own_tokens(request)
    async with stack(draft=ToyDraft(random_rows(VOCAB_SIZE, seed=9), VOCAB_SIZE)) as made:
        for draft_length in (0, 1, 3, 8):
            result = await made.run(replace(request, num_speculative_tokens=draft_length))
            assert result.token_ids == expected
        made.draft.break_links()  # killed
        made.draft.faults.unreachable = True
        assert (await made.run(request)).token_ids == expected


async def first_delta(stream: AsyncIterator[Delta]) -> Delta:
    async with asyncio.timeout(SOON_S):
        return await anext(stream)


async def test_a_draft_killed_halfway_and_back() -> None:
    request = ask(acceptance_method=COUPLED, seed=5, max_tokens=200)
    expected = await own_tokens(request)
    async with stack() as made:
        stream = made.coordinator.generate_stream(request)
        tokens = [*(await first_delta(stream)).token_ids]
        made.draft.break_links()
        made.draft.faults.unreachable = True
        for _ in range(5):
            tokens += (await first_delta(stream)).token_ids
        made.target.faults.hold = True  # the session stands still until the draft is back
        num_before = made.draft.num_forwards
        made.draft.faults.unreachable = False
        await eventually(lambda: len(made.draft.links) == 2)
        made.target.faults.hold = False
        made.target.release_held()
        async with asyncio.timeout(SOON_S):
            async for delta in stream:
                tokens += delta.token_ids
        assert tuple(tokens) == expected
        assert made.draft.num_forwards > num_before


async def test_a_slow_draft_is_gone_without_and_taken_back() -> None:
    request = ask(acceptance_method=COUPLED, seed=5, max_tokens=400)
    expected = await own_tokens(request)
    async with stack(draft_timeout_ms=100) as made:
        made.draft.faults.hold = True
        stream = made.coordinator.generate_stream(request)
        tokens = [*(await first_delta(stream)).token_ids]
        for _ in range(8):
            tokens += (await first_delta(stream)).token_ids
        made.draft.faults.hold = False
        made.draft.release_held()
        async with asyncio.timeout(SOON_S):
            async for delta in stream:
                tokens += delta.token_ids
                last = delta
        assert tuple(tokens) == expected
        assert last.result is not None
        assert last.result.speculation.num_draft_tokens > 0
        assert stats_of(made.coordinator).spec_stats.num_draft_timeouts >= 1


async def test_a_draft_without_room_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyDraftCore, "retry_after_ms", 0)
    async with stack() as made:
        made.draft.faults.refuse = 2
        result = await made.run(ask(max_tokens=100, seed=1))
        assert result.speculation.num_draft_tokens > 0
        assert made.draft.faults.refuse == 0


async def test_no_draft_and_a_draft_that_is_away_from_the_start() -> None:
    async with stack(has_draft=False) as made:
        assert (await made.run(ask())).speculation.num_draft_tokens == 0
        info = await made.coordinator.model_info()
        assert (info.draft_attached, info.draft_length_reason) == (False, "")
    away = ToyDraft(ROWS, VOCAB_SIZE)
    away.faults.unreachable = True
    async with stack(draft=away) as made:
        assert (await made.run(ask())).speculation.num_draft_tokens == 0
        assert (await made.coordinator.model_info()).draft_length_reason == "draft unavailable"
        away.faults.unreachable = False
        await eventually(lambda: bool(away.links))
        assert (await made.run(ask())).speculation.num_draft_tokens > 0
        info = await made.coordinator.model_info()
        assert info.draft_length_reason == ""
        assert (info.draft_attached, info.draft_model, info.target_model) == (True, "toy-draft", "toy-target")


async def test_a_pair_that_does_not_fit_is_refused_at_start() -> None:
    coordinator = Coordinator(
        ToyTarget(ROWS, VOCAB_SIZE), ToyDraft(ROWS, VOCAB_SIZE, tokenizer_hash="other"), settings_of()
    )
    with pytest.raises(PairMismatchError, match="differ"):
        await coordinator.start()
    await coordinator.close()


async def test_a_draft_with_a_shorter_context_is_no_error() -> None:
    async with stack(draft=ToyDraft(ROWS, VOCAB_SIZE, max_model_len=10)) as made:
        result = await made.run(ask(max_tokens=40))
        assert len(result.token_ids) == 40
        assert 0 < result.speculation.num_draft_tokens <= 10


async def test_closing_the_iterator_cancels_and_frees() -> None:
    async with stack() as made:
        stream = made.coordinator.generate_stream(ask(max_tokens=3000))
        await first_delta(stream)
        assert not made.is_free()
        await stream.aclose()
        await eventually(made.is_free)
        stats = stats_of(made.coordinator)
        assert (stats.num_cancelled, stats.num_running) == (1, 0)


async def test_cancelling_the_task_cancels_the_request() -> None:
    async with stack() as made:
        made.target.faults.silent = True
        task = asyncio.create_task(made.run(ask()))
        await eventually(lambda: stats_of(made.coordinator).num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: stats_of(made.coordinator).num_running == 0)
        made.target.faults.silent = False


async def test_a_deadline_ends_a_running_and_a_waiting_request_and_frees() -> None:
    async with stack(max_running_requests=1) as made:
        made.target.faults.hold = True
        running = asyncio.create_task(made.run(ask(), deadline_s=0.5))
        await eventually(lambda: stats_of(made.coordinator).num_running == 1)
        with pytest.raises(DeadlineError):
            await made.run(ask(), deadline_s=0.01)
        with pytest.raises(DeadlineError):
            await running
        await eventually(made.is_free)
        stats = stats_of(made.coordinator)
        assert (stats.num_expired, stats.num_failed) == (2, 0), "a caller's deadline is no failure"
        values = {(reading.name, reading.labels): reading.value for reading in made.coordinator.readings()}
        assert values["outrider_requests_total", (("outcome", "deadline"),)] == 2
        assert values["outrider_requests_total", (("outcome", "failed"),)] == 0
        assert not any(value for (name, _), value in values.items() if name == "outrider_requests_failed_total")


async def test_past_the_queue_requests_are_refused_and_those_that_wait_run_in_turn() -> None:
    async with stack(max_running_requests=2, max_queue=3) as made:
        made.target.faults.hold = True
        tasks = [asyncio.create_task(made.run(ask(seed=seed))) for seed in range(5)]
        await eventually(lambda: stats_of(made.coordinator).num_waiting == 3)
        with pytest.raises(CapacityError) as caught:
            await made.run(ask())
        assert caught.value.retry_after_ms > 0
        info = await made.coordinator.model_info()
        assert (info.num_running, info.num_waiting) == (2, 3)
        made.target.faults.hold = False
        made.target.release_held()
        results = await asyncio.gather(*tasks)
        assert all(len(result.token_ids) == 24 for result in results)
        assert results[4].timing.queue > results[0].timing.queue
        assert stats_of(made.coordinator).num_refused == 1


async def test_a_full_target_makes_requests_wait_in_turn() -> None:
    """Pages for two sessions: the third waits for one of them, and the fourth does not overtake it."""
    target = ToyTarget(ROWS, VOCAB_SIZE, num_pages=14, page_size=4)
    async with stack(target=target) as made:
        order: list[int] = []

        async def run(number: int, max_tokens: int) -> None:
            result = await made.run(ask(max_tokens=max_tokens, seed=number))
            assert len(result.token_ids) == max_tokens
            order.append(number)

        await asyncio.gather(run(0, 24), run(1, 24), run(2, 40), run(3, 1))
        assert order.index(3) > order.index(0)
        assert sorted(order) == [0, 1, 2, 3]


async def test_a_refused_request_waits_its_turn_by_the_clock_too() -> None:
    """Pages of the target are held by others: only time can free them."""
    async with stack() as made:
        made.target.faults.refuse = 3
        assert len((await made.run(ask())).token_ids) == 24


async def test_what_never_fits_is_refused_at_once() -> None:
    async with stack(target=ToyTarget(ROWS, VOCAB_SIZE, num_pages=6, page_size=4)) as made:
        with pytest.raises(InvalidRequestError, match="7 KV pages"):
            await made.run(ask())
        assert len((await made.run(ask(max_tokens=21))).token_ids) == 21


@pytest.mark.parametrize(
    ("smaller", "message"),
    [({"num_pages": 4}, "need 7 KV pages, and the target has 4"), ({"max_model_len": 20}, "the target takes 20")],
)
async def test_what_no_longer_fits_a_target_that_came_back_smaller_fails(smaller: dict[str, int], message: str) -> None:
    async with stack() as made:
        made.target.faults.hold = True
        long = asyncio.create_task(made.run(ask(max_tokens=24)))
        short = asyncio.create_task(made.run(ask(max_tokens=4)))
        await eventually(lambda: stats_of(made.coordinator).num_running == 2)
        made.target.faults.hold = False
        whole = made.target.description
        made.target.description = replace(whole, **smaller)  # type: ignore[arg-type]
        made.target.break_links()
        with pytest.raises(InvalidRequestError, match=message):
            await long
        assert len((await short).token_ids) == 4
        with pytest.raises(InvalidRequestError, match=r"need 8 KV pages|25 tokens"):
            await made.run(ask(prompt_token_ids=(1,) * 25, max_tokens=4))
        made.target.description = whole


async def test_output_stops_at_the_models_length() -> None:
    async with stack(target=ToyTarget(ROWS, VOCAB_SIZE, max_model_len=10)) as made:
        result = await made.run(ask(max_tokens=1000))
        assert (len(result.token_ids), result.finish_reason) == (7, FinishReason.LENGTH)
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            await made.run(ask(prompt_token_ids=(1,) * 10))


@pytest.mark.parametrize("method", AcceptanceMethod)
async def test_a_lost_target_pauses_streams_and_loses_no_token(method: AcceptanceMethod) -> None:
    request = ask(acceptance_method=method, seed=5, max_tokens=200)
    async with stack() as made:
        expected = (await made.run(request)).token_ids
        stream = made.coordinator.generate_stream(request)
        tokens = [*(await first_delta(stream)).token_ids]
        for _ in range(3):
            made.target.break_links()
            tokens += (await first_delta(stream)).token_ids
        async with asyncio.timeout(SOON_S):
            async for delta in stream:
                tokens += delta.token_ids
        if method is COUPLED:
            assert tuple(tokens) == expected
        assert len(tokens) == 200
        assert made.target_ups[:3] == [True, False, True]


async def test_a_target_that_does_not_come_back_fails_all_requests() -> None:
    async with stack(target_timeout_s=0.05, max_running_requests=1) as made:
        made.target.faults.hold = True
        tasks = [asyncio.create_task(made.run(ask())) for _ in range(2)]
        await eventually(lambda: stats_of(made.coordinator).num_waiting == 1)
        made.target.faults.unreachable = True
        made.target.break_links()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, UnavailableError)
        with pytest.raises(UnavailableError):
            await made.run(ask())
        made.target.faults.unreachable = made.target.faults.hold = False
        await eventually(lambda: made.target_ups[-1])
        assert len((await made.run(ask())).token_ids) == 24


async def test_a_request_that_comes_while_the_target_is_away_waits_for_it() -> None:
    async with stack() as made:
        made.target.faults.unreachable = True
        made.target.break_links()
        await eventually(lambda: not made.target_ups[-1])
        task = asyncio.create_task(made.run(ask()))
        await eventually(lambda: stats_of(made.coordinator).num_waiting == 1)
        made.target.faults.unreachable = False
        assert len((await task).token_ids) == 24


async def test_start_waits_for_the_target() -> None:
    target = ToyTarget(ROWS, VOCAB_SIZE)
    target.faults.unreachable = True
    coordinator = Coordinator(target, None, settings_of())
    starting = asyncio.create_task(coordinator.start())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await complete(coordinator, ask())
    with pytest.raises(UnavailableError):
        await coordinator.model_info()
    target.faults.unreachable = False
    async with asyncio.timeout(SOON_S):
        await starting
    assert len((await complete(coordinator, ask())).token_ids) == 24
    await coordinator.close()


async def test_one_failing_session_harms_no_other() -> None:
    async with stack() as made:
        made.target.faults.fail = 1
        tasks = [asyncio.create_task(made.run(ask(seed=seed))) for seed in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], NonFiniteLogitsError)
        assert all(isinstance(result, GenerationResult) for result in results[1:])


async def test_sessions_lost_on_both_sides_are_rebuilt() -> None:
    request = ask(seed=5, max_tokens=100)
    async with stack() as made:
        expected = (await made.run(request)).token_ids
        stream = made.coordinator.generate_stream(request)
        tokens = [*(await first_delta(stream)).token_ids]
        made.target.faults.lose = made.draft.faults.lose = 1
        async with asyncio.timeout(SOON_S):
            async for delta in stream:
                tokens += delta.token_ids
        assert tuple(tokens) == expected
        spec_stats = stats_of(made.coordinator).spec_stats
        assert (spec_stats.num_target_losses, spec_stats.num_draft_losses) == (1, 1)


async def test_speculation_goes_off_by_load_and_comes_on_again() -> None:
    async with stack(disable_by_batch_size=2) as made:
        results = await asyncio.gather(*(made.run(ask(max_tokens=n, seed=n)) for n in (10, 200)))
        assert results[0].speculation.num_draft_tokens == 0
        assert results[1].speculation.num_draft_tokens > 100  # once the other was done
        assert results[1].speculation.num_steps > 10


async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with stack(max_running_requests=1) as made:
        made.target.faults.silent = True
        tasks = [asyncio.create_task(made.run(ask())) for _ in range(2)]
        await eventually(lambda: stats_of(made.coordinator).num_waiting == 1)
        await made.coordinator.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, UnavailableError)
            assert "shutting down" in str(result)


TEXT = byte_level()
TEXT_SIZE = TEXT.get_vocab_size()


async def test_text_in_text_out_and_stops_across_tokens() -> None:
    tokenizer = text_tokenizer(TEXT)
    rows = random_rows(TEXT_SIZE, seed=4)
    target = ToyTarget(rows, TEXT_SIZE, tokenizer_files={"tokenizer.json": TEXT.to_str().encode()})
    async with stack(target=target, draft=ToyDraft(rows, TEXT_SIZE)) as made:
        request = GenerationRequest(prompt="déf", max_tokens=30, seed=2)
        whole = await made.run(request)
        assert whole.usage.prompt_tokens == 4
        assert whole.text == tokenizer.decode(whole.token_ids)
        stop = whole.text[4:7]
        stopped = await made.run(replace(request, stop=(stop,)))
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert (stopped.matched_stop, stopped.finish_reason) == (stop, FinishReason.STOP)
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]


async def test_a_given_chat_template_replaces_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("<{{ messages[0].content }}>")
    files = {
        "tokenizer.json": TEXT.to_str().encode(),
        "chat_template.jinja": b"of the model",
        "additional_chat_templates/tool_use.jinja": b"for tools",
    }
    target = ToyTarget(random_rows(TEXT_SIZE, seed=4), TEXT_SIZE, tokenizer_files=files)
    chat = ChatPrompt(({"role": "user", "content": "hello"},), tools=({"type": "function"},))
    async with stack(target=target, has_draft=False, chat_template=str(tmp_path / "t.jinja")) as made:
        result = await made.run(GenerationRequest(chat=chat, max_tokens=2))
        assert result.usage.prompt_tokens == len(text_tokenizer(TEXT).encode_prompt("<hello>"))
        sent = made.coordinator.tokenizer_files()
    assert sent.files == {
        "tokenizer.json": files["tokenizer.json"],
        "chat_template.jinja": b"<{{ messages[0].content }}>",
    }


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot be read"), (b"{% if %}", "no Jinja"), (b"\xff", "no Jinja")]
)
def test_an_unusable_chat_template_is_told_at_start(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"coordinator\.chat_template: .*{told}"):
        Coordinator(ToyTarget(ROWS, VOCAB_SIZE), None, settings_of(chat_template=str(path)))


async def test_a_long_prompt_is_tokenized_beside_the_event_loop() -> None:
    target = ToyTarget(
        random_rows(TEXT_SIZE), TEXT_SIZE, max_model_len=80_000,
        tokenizer_files={"tokenizer.json": TEXT.to_str().encode()},
    )  # fmt: skip
    async with stack(target=target, has_draft=False) as made:
        result = await made.run(GenerationRequest(prompt="x" * 60_000, max_tokens=1))
        assert result.usage.prompt_tokens == 60_000


async def test_any_mix_of_endings_leaves_every_page_free() -> None:
    async with stack(max_running_requests=4) as made:

        async def run(number: int) -> None:
            stream = made.coordinator.generate_stream(
                ask(seed=number, max_tokens=10 + 7 * number, acceptance_method=list(AcceptanceMethod)[number % 3]),
                deadline_s=0.02 if number % 5 == 4 else None,
            )
            with contextlib.suppress(DeadlineError, NonFiniteLogitsError):
                async for _ in stream:
                    if number % 3 == 2:
                        break
            await stream.aclose()

        tasks = [asyncio.create_task(run(number)) for number in range(24)]
        await eventually(lambda: stats_of(made.coordinator).num_finished > 2)
        made.target.faults.fail = 2
        made.target.faults.lose = made.draft.faults.lose = 3
        made.draft.break_links()
        await asyncio.gather(*tasks)
        await eventually(made.is_free)
        stats = stats_of(made.coordinator)
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_finished + stats.num_cancelled + stats.num_expired + stats.num_failed == 24


async def test_the_services_hear_of_a_step_before_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as made:
        sent_before: list[int] = []
        take_text = Output.take_text

        def watched(output: Output, num_tokens: int | None = None) -> str:
            sent_before.append(len(made.target.link.sent) + len(made.draft.link.sent))
            return take_text(output, num_tokens)

        monkeypatch.setattr(Output, "take_text", watched)
        await made.run(ask())
    # With both sides prefilled, the tokens of each step come when the next one's question is out, or later.
    first, *later = sent_before
    assert first >= 2
    assert later
    assert all(num_sent >= 5 + 2 * index for index, num_sent in enumerate(later))
