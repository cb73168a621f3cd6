"""Figures that are shown: what each is computed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.cli.statistics import acceptance_rate, statistics, tokens_per_second
from outrider.demo.measure import DemoComparison, DemoRun
from outrider.generation import GenerationResult, SpeculationStats, StageTimes, Timing, Usage
from outrider.types import FinishReason


def result(
    histogram: tuple[int, ...], *, draft_length: int = 4, num_tokens: int = 21, total: float = 2.5
) -> GenerationResult:
    num_accepted = sum(index * count for index, count in enumerate(histogram))
    num_steps = sum(histogram)
    return GenerationResult(
        text="",
        token_ids=tuple(range(num_tokens)),
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
        logprobs=None,
        prompt_logprobs=None,
        usage=Usage(prompt_tokens=3, completion_tokens=num_tokens),
        speculation=SpeculationStats(
            num_steps=num_steps + 1,
            num_draft_tokens=draft_length * num_steps,
            num_accepted_tokens=num_accepted,
            num_judged_tokens=num_accepted + sum(histogram[:draft_length]),
            acceptance_histogram=histogram,
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 0.0,
        ),
        seed=7,
        request_id="r",
        timing=Timing(
            queue=0.0,
            first_token=0.5,
            total=total,
            draft=0.1,
            target=0.2,
            accept=0.01,
            wire=0.02,
            prefill=StageTimes(draft=0.0, target=0.15, accept=0.001, wire=0.005),
        ),
    )


def test_the_acceptance_rate_counts_drafted_tokens() -> None:
    # Two steps kept all four, one kept one and rejected the next, one rejected the first.
    stats = result((1, 1, 0, 0, 2)).speculation
    assert acceptance_rate(stats) == pytest.approx(9 / 16)


def test_without_a_draft_there_is_no_data() -> None:
    stats = result(()).speculation
    assert acceptance_rate(stats) is None
    rows = dict(statistics(result(())))
    assert rows["acceptance rate"] == rows["mean acceptance length"] == "no data"
    assert "forced by the grammar" not in rows


def test_tokens_that_a_grammar_forces_are_told_apart_from_drafts() -> None:
    found = result(())
    forced = replace(found.speculation, num_forced_tokens=9, num_accepted_forced_tokens=8)
    rows = dict(statistics(replace(found, speculation=forced)))
    assert rows["forced by the grammar"] == "9 tokens proposed, 8 accepted"


def test_times_of_a_grammar_are_told() -> None:
    found = result(())
    assert "grammar" not in dict(statistics(found))
    rows = dict(statistics(replace(found, timing=replace(found.timing, grammar=0.0047, mask=0.0123))))
    assert rows["grammar"] == "compiled in 4.7 ms, masks 12.3 ms beside forwards"


def test_proposals_that_were_begun_ahead_are_told() -> None:
    found = result((0, 1))
    assert "drafted ahead" not in dict(statistics(found))
    rows = dict(statistics(replace(found, timing=replace(found.timing, num_drafts_ahead=1))))
    assert rows["drafted ahead"] == "1 of 1 proposals, 1 passes without"


def test_speed_counts_tokens_after_the_first() -> None:
    assert tokens_per_second(result((), num_tokens=21, total=2.5)) == pytest.approx(10.0)
    assert tokens_per_second(result((), num_tokens=1)) is None


def test_statistics_say_where_the_time_went() -> None:
    rows = dict(statistics(result((0, 0, 0, 0, 4))))
    assert rows["time to first token"] == "500.0 ms"
    assert rows["in draft"] == "100.0 ms (prefill 0.0, decode 100.0)"
    assert rows["in target"] == "200.0 ms (prefill 150.0, decode 50.0)"
    assert rows["in accept"] == "10.0 ms (prefill 1.0, decode 9.0)"
    assert rows["on the wire"] == "20.0 ms (prefill 5.0, decode 15.0)"
    assert rows["acceptance rate"] == "1.00"


def test_a_comparison_takes_medians_and_sums() -> None:
    fast = tuple(DemoRun(seconds, (result((1, 0, 0, 0, 3)),)) for seconds in (1.0, 2.0, 7.0))
    slow = tuple(DemoRun(seconds, (result(()),)) for seconds in (3.0, 4.0, 100.0))
    comparison = DemoComparison(temperature=0.0, draft_length=4, with_draft=fast, without=slow)
    assert comparison.speed == pytest.approx(21 / 2)
    assert comparison.plain_speed == pytest.approx(21 / 4)
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.acceptance_rate == pytest.approx(12 / 16)
    assert comparison.mean_acceptance_length == pytest.approx(1 + 12 / 4)
    assert comparison.tokens_per_pass == pytest.approx(21 / 5)
