"""The serving benchmark against a scripted client: what is sent, what is counted, what is refused."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.benchmarks.samples import median
from outrider.benchmarks.schema import load, save
from outrider.benchmarks.serving.figures import detailed_keys, measured_series, speculation_of, vllm_keys
from outrider.benchmarks.serving.gate import OutputGateError, check_exactness
from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.records import Record, Run
from outrider.benchmarks.serving.run import BASELINE, SPECULATION, ServePlan, run_plan, texts, to_result, to_vllm_json
from outrider.benchmarks.serving.workload import Traffic, arrival_times, code_prompts, random_prompts
from outrider.benchmarks.tables import render
from outrider.benchmarks.tables.cells import best_fixed
from outrider.cli.bench.flags import parse_sampling
from outrider.errors import ConfigError, UnavailableError
from outrider.generation import GenerationResult, SpeculationStats, StageTimes, Timing, Usage
from outrider.types import FinishReason, SamplingParams
from tests.benchmarks.scripted_client import DRAFT_LENGTH, ScriptedClient
from tests.support.tiny_models import cached_tiny_model

PROMPTS = tuple(random_prompts(6, 5, 100, seed=1))


def record_of(
    *,
    sent_at: float,
    times: tuple[float, ...],
    counts: tuple[int, ...],
    histogram: tuple[int, ...] = (),
    num_draft_tokens: int = 0,
    num_judged_tokens: int = 0,
) -> Record:
    result = GenerationResult(
        text="text",
        token_ids=tuple(range(sum(counts))),
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
        logprobs=None,
        prompt_logprobs=None,
        usage=Usage(10, sum(counts)),
        speculation=SpeculationStats(
            num_steps=len(counts),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=sum(length * count for length, count in enumerate(histogram)),
            num_judged_tokens=num_judged_tokens,
            acceptance_histogram=histogram,
            mean_acceptance_length=0.0,
        ),
        seed=0,
        request_id="",
        timing=Timing(
            queue=0.5,
            first_token=1.0,
            total=4.5,
            draft=1.0,
            target=2.0,
            accept=0.5,
            wire=0.5,
            prefill=StageTimes(target=0.25, wire=0.125),
        ),
    )
    return Record(10, sent_at, times[-1], times, counts, result)


TWO = Run(
    records=(
        record_of(
            sent_at=0.0,
            times=(1.0, 1.5, 2.5),
            counts=(1, 3, 1),
            histogram=(1, 0, 1),
            num_draft_tokens=6,
            num_judged_tokens=4,
        ),
        record_of(
            sent_at=0.5,
            times=(2.5, 3.0),
            counts=(1, 4),
            histogram=(0, 0, 0, 1),
            num_draft_tokens=3,
            num_judged_tokens=3,
        ),
        Record(10, 0.0, 0.1, error="CapacityError: no room"),
    ),
    duration=4.0,
    num_users=2,
    client_load=0.25,
)


def test_times_of_a_record_are_those_of_its_messages() -> None:
    record = TWO.records[0]
    assert record.time_to_first_token == 1.0
    assert record.latency == 2.5
    assert record.time_per_output_token == pytest.approx(1.5 / 4)
    assert record.gaps == (0.5, 1.0)
    assert TWO.records[2].time_to_first_token is None
    assert TWO.records[2].time_per_output_token is None


def test_a_stream_is_timed_to_its_last_token_and_a_run_to_its_last_request() -> None:
    late_end = dataclasses.replace(TWO.records[0], ended_at=9.0)
    assert late_end.time_per_output_token == pytest.approx(1.5 / 4)
    assert TWO.time_per_token_until_all_finished == pytest.approx(4.0 * 2 / 10)
    series = {item.name: item.samples for item in measured_series([TWO], SPECULATION)}
    assert series["until_all_finished"] == pytest.approx((1e3 * 4.0 * 2 / 10,))
    assert vllm_keys([TWO])["outrider_client_load"] == 0.25


def test_decoding_is_told_without_the_time_of_the_first_tokens() -> None:
    assert TWO.time_per_token_after_the_first is None
    measured = dataclasses.replace(TWO, first_tokens_duration=1.0)
    assert measured.time_per_token_after_the_first == pytest.approx((4.0 - 1.0) * 2 / (10 - 2))
    series = {item.name: item.samples for item in measured_series([measured], SPECULATION)}
    assert series["after_first_tokens"] == pytest.approx((1e3 * 3.0 * 2 / 8,))


def test_figures_are_in_the_keys_of_vllm() -> None:
    keys = vllm_keys([TWO])
    assert (keys["completed"], keys["failed"], keys["duration"]) == (2, 1, 4.0)
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (20, 10)
    assert (keys["request_throughput"], keys["output_throughput"], keys["total_token_throughput"]) == (0.5, 2.5, 7.5)
    assert keys["max_output_tokens_per_s"] == 4  # in the second from 1 to 2, and again from 3 to 4
    assert keys["max_concurrent_requests"] == 2
    assert keys["mean_ttft_ms"] == pytest.approx(1500.0)
    assert keys["median_tpot_ms"] == pytest.approx(1e3 * (1.5 / 4 + 0.5 / 4) / 2)
    assert keys["mean_itl_ms"] == pytest.approx(1e3 * (0.5 + 1.0 + 0.5) / 3)
    assert keys["median_e2el_ms"] == pytest.approx(2500.0)
    assert keys["spec_decode_num_drafts"] == 3
    assert keys["spec_decode_acceptance_rate"] == pytest.approx(100 * 5 / 9)
    assert keys["spec_decode_acceptance_length"] == pytest.approx(1 + 5 / 3)
    assert keys["spec_decode_per_position_acceptance_rates"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    detailed = detailed_keys([TWO])
    assert detailed["itls"] == [[0.5, 1.0], [0.5], []]
    assert detailed["errors"][2] == "CapacityError: no room"


def test_only_judged_tokens_count_for_acceptance() -> None:
    found = speculation_of(TWO.records)
    assert (found.num_accepted_tokens, found.num_judged_tokens, found.num_draft_tokens) == (5, 7, 9)
    assert found.acceptance == pytest.approx(5 / 7)


def test_without_drafts_there_is_no_data_and_no_division_by_zero() -> None:
    plain = record_of(sent_at=0.0, times=(1.0, 2.0), counts=(1, 1))
    found = speculation_of([plain])
    assert (found.acceptance, found.acceptance_rate, found.acceptance_length) == (None, None, None)
    assert not any(key.startswith("spec_decode") for key in vllm_keys([Run((plain,), 2.0)]))


def test_decode_steps_are_timed_apart_from_the_prefill() -> None:
    series = {item.name: item.samples for item in measured_series([TWO], SPECULATION)}
    assert series["decode_draft"] == pytest.approx((1e3 / 2, 1e3))
    assert series["decode_target"] == pytest.approx((1.75e3 / 2, 1.75e3))
    assert series["decode_total"] == pytest.approx((3.5e3 / 2, 3.5e3))
    assert series["prefill_target"] == pytest.approx((250.0, 250.0))
    assert series["prefill_wire"] == pytest.approx((125.0, 125.0))
    assert series["prefill_total"] == pytest.approx((500.0, 500.0))
    assert series["user_throughput"] == pytest.approx((4 / 1.5, 4 / 0.5))


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    assert arrival_times(Traffic(), 3, seed=0) == [0.0, 0.0, 0.0]
    gaps = np.diff(arrival_times(Traffic(request_rate=4.0, burstiness=2.0), 20_000, seed=0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25 / math.sqrt(2.0), rel=0.03)
    assert arrival_times(Traffic(request_rate=4.0), 5, seed=1) == arrival_times(Traffic(request_rate=4.0), 5, seed=1)


@pytest.mark.parametrize(
    "bad", [{"request_rate": 0.0}, {"request_rate": math.nan}, {"burstiness": 0.0}, {"max_concurrency": 0}]
)
def test_impossible_traffic_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Traffic(**bad)


def test_prompts_have_the_length_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"  # instead of all of Outrider's source, which takes seconds to tokenize
    package.mkdir()
    (package / "module.py").write_text("def double(x: int) -> int:\n    return 2 * x\n" * 8, encoding="utf-8")
    monkeypatch.setattr(outrider, "__file__", str(package / "__init__.py"))
    assert {len(prompt) for prompt in PROMPTS} == {5}
    assert all(0 <= token < 100 for prompt in PROMPTS for token in prompt)
    folder = cached_tiny_model("llama")
    prompts = code_prompts(3, 17, folder, seed=0)
    assert [len(prompt) for prompt in prompts] == [17] * 3
    assert prompts == code_prompts(3, 17, folder, seed=0) != code_prompts(3, 17, folder, seed=1)
    with pytest.raises(ConfigError, match="must be below"):
        code_prompts(1, 10_000, folder, seed=0)
    with pytest.raises(ConfigError, match="input_len"):
        random_prompts(1, 0, 100, seed=0)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        code_prompts(1, 5, tmp_path, seed=0)


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    client = ScriptedClient()
    run = await run_load(client, PROMPTS, Traffic(max_concurrency=2), Decoding(max_tokens=6, seed=40))
    assert client.most_running == 2
    assert len(run.completed) == len(PROMPTS)
    assert [options.get("seed") for options in client.requests] == [40, 41, 42, 43, 44, 45]
    assert all(record.token_counts == (2, 2, 2) for record in run.records)
    unlimited = ScriptedClient()
    await run_load(unlimited, PROMPTS, Traffic(), Decoding(max_tokens=6))
    assert unlimited.most_running == len(PROMPTS)


async def test_a_request_that_fails_is_a_record_and_not_an_end() -> None:
    client = ScriptedClient(fail_prompts=frozenset({PROMPTS[0][0]}))
    run = await run_load(client, PROMPTS, Traffic(), Decoding(max_tokens=4))
    assert run.records[0].error == "CapacityError: no room"
    assert len(run.completed) == sum(prompt[0] != PROMPTS[0][0] for prompt in PROMPTS)


async def check(client: ScriptedClient, *, tolerance: float) -> Any:
    return await check_exactness(
        client, PROMPTS[:2], max_tokens=8, num_speculative_tokens=None, tie_tolerance=tolerance
    )


async def test_the_gate_passes_equal_output() -> None:
    report = await check(ScriptedClient(), tolerance=0.0)
    assert (report.num_prompts, report.num_tokens, report.num_ties) == (2, 16, 0)


async def test_the_gate_stops_at_a_token_that_speculation_changed() -> None:
    with pytest.raises(
        OutputGateError, match=rf"with speculation token \d+, without it token \d+ after {5 + 3} tokens"
    ):
        await check(ScriptedClient(lie_at=3, gap=0.5), tolerance=0.1)


async def test_the_gate_lets_a_tie_pass_and_counts_it() -> None:
    report = await check(ScriptedClient(lie_at=3, gap=0.05), tolerance=0.1)
    assert (report.num_tokens, report.num_ties) == (2 * 3, 2)


def plan_of(**changes: Any) -> ServePlan:
    plan = ServePlan(PROMPTS, Traffic(max_concurrency=2), Decoding(max_tokens=8), num_runs=3, with_baseline=True)
    return dataclasses.replace(plan, **changes)


async def test_arms_are_interleaved_and_get_the_same_requests() -> None:
    client = ScriptedClient()
    done: list[None] = []
    plan = plan_of(num_warmups=0, num_gate_prompts=0)
    outcome = await run_plan(client, plan, on_done=lambda: done.append(None))
    assert len(done) == plan.num_requests == 36
    lengths = [options.get("num_speculative_tokens") for options in client.requests]
    blocks = [lengths[begin : begin + 6] for begin in range(0, 36, 6)]
    assert blocks == [[DRAFT_LENGTH] * 6, [0] * 6, [0] * 6, [DRAFT_LENGTH] * 6, [DRAFT_LENGTH] * 6, [0] * 6]
    salts = [options.get("cache_salt") for options in client.requests]
    assert [len(set(salts[begin : begin + 6])) for begin in range(0, 36, 6)] == [1] * 6
    assert len(set(salts)) == 6, "no run finds the prompts of another in a prefix cache"
    assert len(outcome.speedups) == 3
    first = outcome.runs[SPECULATION][0].output_throughput / outcome.runs[BASELINE][0].output_throughput
    assert outcome.speedups[0] == pytest.approx(first)


async def test_first_tokens_are_timed_before_each_run_of_an_arm() -> None:
    client = ScriptedClient()
    plan = plan_of(num_warmups=0, num_gate_prompts=0, num_runs=2, with_first_tokens=True)
    outcome = await run_plan(client, plan)
    tokens = [options["max_tokens"] for options in client.requests]
    assert tokens == ([1] * 6 + [8] * 6) * 4
    assert len({options["cache_salt"] for options in client.requests}) == 8, "no run finds the prompts of another"
    result = to_result(outcome, plan, name="some", device="cpu", configuration={"pair": "a / b", "synthetic": False})
    shown = render([result])
    for arm in (SPECULATION, BASELINE):
        found = result.find("after_first_tokens", arm=arm)
        assert found is not None and len(found.samples) == 2
        assert f"{median(found.samples):.2f}" in shown


async def test_cached_prompts_are_those_of_the_warm_up() -> None:
    client = ScriptedClient()
    plan = plan_of(num_warmups=6, num_gate_prompts=0, num_runs=2, with_first_tokens=True, with_cached_prompts=True)
    outcome = await run_plan(client, plan)
    assert len(client.requests) == 6 * 2 * (1 + 2 + 2)
    assert len({options["cache_salt"] for options in client.requests}) == 1
    result = to_result(outcome, plan, name="some", device="cpu", configuration={})
    assert result.configuration["cached_prompts"] is True


async def test_what_was_measured_is_compared_too() -> None:
    outcome = await run_plan(ScriptedClient(lie_at=3), plan_of(num_gate_prompts=0))
    assert outcome.num_different() == 3 * len(PROMPTS)
    assert (await run_plan(ScriptedClient(), plan_of())).num_different() == 0
    assert (await run_plan(ScriptedClient(), plan_of(with_baseline=False))).num_different() is None


async def test_a_red_gate_gives_no_figures() -> None:
    client = ScriptedClient(lie_at=0, gap=2.0)
    with pytest.raises(OutputGateError):
        await run_plan(client, plan_of())
    assert not [options for options in client.requests if options.get("seed") is not None], "nothing was measured"


async def test_a_run_in_which_everything_failed_is_an_error() -> None:
    client = ScriptedClient(fail_prompts=frozenset(range(100)))
    with pytest.raises(UnavailableError, match="CapacityError: no room"):
        await run_plan(client, plan_of(num_gate_prompts=0))


async def test_further_arms_have_fixed_lengths_or_other_sampling_and_are_tabled() -> None:
    hot = SamplingParams(temperature=0.6, top_p=0.9)
    constrained = parse_sampling('{"temperature": 0, "json_schema": {"type": "array"}}', "--also-sampling")
    plan = dataclasses.replace(plan_of(with_baseline=True), fixed_lengths=(2, 5), samplings=(hot, constrained))
    client, fixed = ScriptedClient(), ScriptedClient()
    outcome = await run_plan(client, plan, load_fixed=partial(run_load, fixed))
    assert list(outcome.runs) == ["speculation", "baseline", "K=2", "K=5", "T=0.6 p=0.9 k=0", "T=0 p=1 k=0 json_schema"]
    schemas = [options for options in client.requests if "json_schema" in options]
    assert schemas and not any(options.get("ignore_eos") for options in schemas)
    assert {options.get("num_speculative_tokens") for options in fixed.requests} == {2, 5}, "another coordinator's"
    assert {options.get("num_speculative_tokens") for options in client.requests} == {DRAFT_LENGTH, 0}
    assert 0.6 in {options.get("temperature") for options in client.requests}
    result = to_result(
        outcome, plan, name="arms", device="cpu", configuration={"pair": "a / b", "synthetic": False}, gpus=2
    )
    assert result.configuration["num_gpus"] == 2
    arm, rate = best_fixed(result) or ("", 0.0)
    assert arm in {"K=2", "K=5"}
    assert f"{rate / 2:.1f} ({arm})" in render([result])


async def test_a_sampled_plan_has_its_greedy_gate_and_samples_with_and_without_speculation() -> None:
    decoding = Decoding(max_tokens=8, temperature=0.7, top_p=0.8, top_k=20)
    client, plan = ScriptedClient(), plan_of(decoding=decoding)
    outcome = await run_plan(client, plan)
    measured = [options for options in client.requests if options.get("seed") is not None]
    gate = [options for options in client.requests if options.get("seed") is None]
    assert gate and {options.get("temperature") for options in gate} == {0.0}
    for length in (DRAFT_LENGTH, 0):
        of_arm = [options for options in measured if options.get("num_speculative_tokens") == length]
        sampled = {(options.get("temperature"), options.get("top_p"), options.get("top_k")) for options in of_arm}
        assert sampled == {(0.7, 0.8, 20)}
    result = to_result(outcome, plan, name="hot", device="cpu", configuration={"pair": "a / b", "synthetic": False})
    assert result.configuration["gate"] == {"num_prompts": 2, "num_tokens": 64, "num_ties": 0}
    assert "requests_that_differ" not in result.figures
    assert "| 0.7, top-p 0.8, top-k 20 |" in render([result])
    with pytest.raises(OutputGateError):
        await run_plan(ScriptedClient(lie_at=0, gap=2.0), plan)


async def test_the_result_holds_raw_samples_of_both_arms(tmp_path: Path) -> None:
    plan = plan_of()
    outcome = await run_plan(ScriptedClient(), plan)
    result = to_result(outcome, plan, name="some", device="cpu", configuration={"pair": "a / b", "synthetic": False})
    assert load(save(result, tmp_path)) == result
    for arm in (SPECULATION, BASELINE):
        found = result.find("ttft", arm=arm)
        assert found is not None
        assert len(found.samples) == 3 * len(PROMPTS)
    speedup = result.find("speedup")
    assert speedup is not None
    assert median(speedup.samples) == median(outcome.speedups)
    assert result.configuration["gate"] == {"num_prompts": 2, "num_tokens": 64, "num_ties": 0}
    assert result.configuration["traffic"]["request_rate"] == "inf"
    assert result.figures[SPECULATION]["outrider_acceptance"] == pytest.approx(4 / 7)


async def test_the_block_and_the_flat_keys_are_those_of_vllm() -> None:
    plan = plan_of()
    outcome = await run_plan(ScriptedClient(), plan)
    ours, alone, comparison = texts(outcome, plan)
    for line in (
        "Successful requests:                     18",
        "Maximum request concurrency:             2",
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "---------------Speculative Decoding---------------",
        "Acceptance length:                       2.00",
        "  Position 0:                            100.00",
        "Acceptance of judged tokens (%):         57.14",
        "-----------Time of the prefill by stage-----------",
        "----------Time of a decode step by stage----------",
        "Draft (ms):                              66.67",
    ):
        assert line in ours.splitlines()
    assert "Speculative Decoding" not in alone
    assert comparison.startswith("Speculation is ")
    flat = json.loads(json.dumps(to_vllm_json(outcome, plan)))
    assert flat["backend"] == "outrider"
    assert {"date", "model_id", "request_rate", "max_concurrency", "p99_itl_ms", "ttfts", "generated_texts"} <= set(
        flat
    )
