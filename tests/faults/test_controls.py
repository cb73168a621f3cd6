"""The suite itself: each kind of wrong stream, leak and crash that it is there to find is found."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import UnavailableError
from outrider.generation import Delta, GenerationResult, SpeculationStats, Timing, Usage
from outrider.types import FinishReason, TokenLogprob
from tests.faults.oracle import Reading, differences, is_near_tie
from tests.faults.processes import Process, ServiceProcess
from tests.faults.readings import Metrics, parse_metrics
from tests.faults.readings import Usage as Held
from tests.faults.report import Result
from tests.faults.requests import Request, draw_catalogue
from tests.faults.stack import Stack
from tests.faults.traffic import PLAIN, Manner, Tally, Traffic, read
from tests.faults.watch import History, Sample

REQUEST = Request(0, {"prompt": "a", "max_tokens": 6, "seed": 1}, is_determined=True)
TWIN = GenerationResult(
    text="abcdef",
    token_ids=(1, 2, 3, 4, 5, 6),
    finish_reason=FinishReason.LENGTH,
    matched_stop=None,
    logprobs=None,
    prompt_logprobs=None,
    usage=Usage(1, 6),
    speculation=SpeculationStats(0, 0, 0, 0, (), 0.0),
    seed=1,
    request_id="",
    timing=Timing(0.0, 0.0, 0.0),
)

GREEDY = {"prompt": "a", "temperature": 0.0}

Script = list[tuple[int, ...]]
"""Tokens, delta by delta."""


class ScriptedStreams:
    """A client whose streams bring these deltas, and then this end."""

    def __init__(self, script: Script, end: Callable[[Script], GenerationResult | Exception | None]) -> None:
        self.script, self.end = script, end

    async def stream(self, **options: object) -> AsyncGenerator[Delta, None]:
        del options
        for token_ids in self.script:
            await asyncio.sleep(0)
            yield Delta(_text(token_ids), token_ids)
        end = self.end(self.script)
        if isinstance(end, Exception):
            raise end
        if end is None:
            await asyncio.Event().wait()
        else:
            yield Delta("", (), result=end)


def _text(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") - 1 + token_id) for token_id in token_ids)


def as_told(script: Script) -> GenerationResult:
    """The result that these deltas make up."""
    token_ids = tuple(token_id for delta in script for token_id in delta)
    return replace(TWIN, token_ids=token_ids, text=_text(token_ids), usage=Usage(1, len(token_ids)))


def nothing(script: Script) -> None:
    del script


async def tally_of(streams: ScriptedStreams, manner: Manner = PLAIN) -> Tally:
    tally = Tally()
    tally.take(await read(streams, REQUEST, tally, manner=manner, hang_s=0.2), TWIN)
    return tally


@pytest.mark.parametrize(
    ("options", "second", "expected"),
    [
        (GREEDY, -1.00001, True),
        ({"temperature": 0.8, "top_k": 1}, -1.00001, True),
        (GREEDY, -1.001, False),
        ({"temperature": 0.8}, -1.00001, False),
        ({**GREEDY, "repetition_penalty": 1.15}, -1.00001, False),
    ],
)
def test_a_request_near_a_tie_is_known(options: dict[str, object], second: float, expected: bool) -> None:
    logprobs = (TokenLogprob(3, -0.1, 1, ((3, -0.1), (4, -2.0))), TokenLogprob(1, -1.0, 1, ((1, -1.0), (2, second))))
    assert is_near_tie(Request(0, options, is_determined=True), replace(TWIN, logprobs=logprobs)) is expected


async def test_a_stream_that_is_its_twin_is_right() -> None:
    tally = await tally_of(ScriptedStreams([(1, 2), (3,), (4, 5, 6)], as_told))
    assert not tally.problems()
    assert (tally.num_streams, tally.num_tokens, tally.num_outputs) == (1, 6, 4)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([(1, 2), (2, 3), (4, 5)], "another token at 2"),
        ([(1, 2), (4, 5, 6)], "another token at 2"),
        ([(1, 2), (3, 4, 5)], "ended after 5 tokens, not 6"),
        ([(1, 2), (3, 4, 5, 6), (6,)], "7 tokens of 6"),
    ],
    ids=["repeated", "lost", "cut short", "one too many"],
)
async def test_a_token_too_many_or_too_few_is_found(script: Script, words: str) -> None:
    tally = await tally_of(ScriptedStreams(script, as_told))
    assert len(tally.different) == 1
    assert words in tally.different[0]


async def test_deltas_that_are_not_the_result_are_found() -> None:
    tally = await tally_of(ScriptedStreams([(1, 2), (3, 4, 5), (6,)], lambda script: as_told(script[:2])))
    assert "the result 5 others" in tally.different[0]


async def test_a_stream_that_stands_still_is_hung() -> None:
    tally = await tally_of(ScriptedStreams([(1, 2)], nothing))
    assert len(tally.hung) == 1
    assert not tally.different


async def test_a_stream_hangs_before_its_first_output_only_while_no_other_goes_on() -> None:
    tally = Tally()

    async def others() -> None:
        while time.monotonic() - began < 1.0:
            await asyncio.sleep(0.001)
            tally.num_outputs += 1

    began = time.monotonic()
    reading, _ = await asyncio.gather(
        read(ScriptedStreams([], nothing), REQUEST, tally, manner=PLAIN, hang_s=0.2), others()
    )
    assert reading.is_hung
    assert time.monotonic() - began > 1.0, "it was given up while others went on"


async def test_an_error_is_a_failure_and_what_came_before_it_is_compared() -> None:
    def broken(script: Script) -> Exception:
        del script
        return UnavailableError("gone")

    tally = await tally_of(ScriptedStreams([(1, 3)], broken))
    assert "UnavailableError: gone" in tally.failed[0]
    assert len(tally.different) == 1


async def test_a_reader_that_leaves_is_no_failure_and_what_it_read_is_compared() -> None:
    tally = await tally_of(ScriptedStreams([(1,), (9,), (3,)], as_told), Manner(leaves_after=2))
    assert tally.num_left == 1
    assert not tally.failed
    assert "another token at 1" in tally.different[0]


async def test_traffic_reports_what_one_of_its_streams_did() -> None:
    wrong = ScriptedStreams([(1, 2), (2, 3, 4, 5)], as_told)
    right = ScriptedStreams([(1, 2), (3, 4, 5, 6)], as_told)
    async with Traffic([wrong, right], [REQUEST], {0: TWIN}, num_streams=2, rng=random.Random(1)) as traffic:
        await traffic.progress(20.0)
    assert 0 < len(traffic.tally.different) < traffic.tally.num_streams


@pytest.mark.parametrize(("text", "is_wrong"), (('{"size": 3}', False), ('{"size": "3"}', True), ('{"size": 3', True)))
def test_a_text_that_does_not_match_its_schema_is_found(text: str, is_wrong: bool) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}}
    reading = Reading(Request(0, {**REQUEST.options, "json_schema": schema}, is_determined=False), list(TWIN.token_ids))
    reading.texts = [text]
    reading.result = replace(TWIN, text=text, finish_reason=FinishReason.STOP)
    assert bool(differences(reading, None)) is is_wrong


def test_a_free_stream_is_held_to_its_candidates() -> None:
    catalogue = draw_catalogue(random.Random(3), 200)
    constrained = [request for request in catalogue if "json_schema" in request.options]
    assert len({(request.is_determined, request.options["temperature"] == 0) for request in constrained}) == 3
    free = [request for request in catalogue if not request.is_determined and request not in constrained]
    assert free
    assert all(request.max_rank == request.options["top_k"] for request in free)


class FakeProcess(Process):
    """A service that says these metrics."""

    def __init__(self, name: str, metrics: Metrics | None) -> None:
        super().__init__(name, port=0, metrics_port=0)
        self.said = metrics

    @property
    def pid(self) -> int | None:
        return 1

    @property
    def crashes(self) -> list[str]:
        return []

    async def metrics(self) -> Metrics | None:
        return self.said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"outrider_sessions_open": 1.0, "outrider_kv_pages_used": 0.0}, "target-0: outrider_sessions_open 1"),
        ({"outrider_sessions_open": 0.0, "outrider_kv_pages_used": 3.0}, "target-0: outrider_kv_pages_used 3"),
        (None, "target-0 gives no metrics"),
    ],
)
async def test_a_session_a_page_or_a_silent_service_that_is_left_is_found(said: Metrics | None, words: str) -> None:
    free = {"outrider_sessions_open": 0.0, "outrider_kv_pages_used": 0.0}
    stack = Stack([FakeProcess("target-0", said)], [FakeProcess("draft-0", free)], [], {})
    assert await stack.idle(deadline_s=0.0) == [words]


def test_metrics_are_named_by_their_labels_but_for_the_role() -> None:
    text = '# TYPE a gauge\na{role="draft"} 2.0\n# TYPE b gauge\nb{side="target"} 3.0\n'
    assert parse_metrics(text) == {"a": 2.0, "b/target": 3.0}


async def test_a_process_that_ends_by_itself_is_a_crash_and_one_that_was_killed_is_none(tmp_path: Path) -> None:
    # A module that ends at once, and one that serves for ever, in place of services.
    crashing = ServiceProcess("crashing", "this", {}, folder=tmp_path)
    await crashing.start()
    while not crashing.crashes:
        await asyncio.sleep(0.01)
    await crashing.stop()
    steady = ServiceProcess("steady", "http.server", {}, folder=tmp_path)
    steady.command = ["http.server", str(steady.port)]
    await steady.start()
    before = steady.pid
    steady.kill()
    while steady.pid in {before, None}:
        await asyncio.sleep(0.01)
    await steady.stop()
    assert not steady.crashes


def test_growth_is_that_of_one_process_and_thirds_are_of_time() -> None:
    grown = History("one", [Sample(float(at), 7, Held(100.0 + at, 1, 1)) for at in range(90)])
    assert (grown.growth_mib, grown.peak_growth_mib) == (89.0, 89.0)
    assert grown.last_over_middle == pytest.approx(174.5 / 144.5, rel=0.01)
    restarted = History("two", [Sample(0.0, 7, Held(10.0, 1, 1)), Sample(1.0, 8, Held(90.0, 1, 1))])
    assert restarted.growth_mib == 0.0


def test_a_figure_past_its_bound_fails_its_scenario() -> None:
    result = Result("any", 1, 1.0)
    result.add("informs", 1e9)
    result.add("within", 0.5, 0.5)
    assert result.passes
    result.add("past", 1, 0)
    assert not result.passes


def test_the_same_seed_draws_the_same_requests() -> None:
    assert draw_catalogue(random.Random(5), 50) == draw_catalogue(random.Random(5), 50)
    assert draw_catalogue(random.Random(5), 50) != draw_catalogue(random.Random(6), 50)


def test_the_wait_for_the_first_output_is_no_gap() -> None:
    began = time.monotonic()

    class Late(ScriptedStreams):
        async def stream(self, **options: object) -> AsyncGenerator[Delta, None]:
            await asyncio.sleep(0.05)
            async for delta in super().stream(**options):
                yield delta

    reading = asyncio.run(read(Late([(1, 2, 3, 4, 5, 6)], as_told), REQUEST, Tally()))
    assert 0.05 <= reading.first_output_s <= time.monotonic() - began
    assert all(gap < reading.first_output_s for gap, _ in reading.gaps)
    assert not differences(reading, TWIN)
