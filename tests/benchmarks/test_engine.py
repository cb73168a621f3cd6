"""The engine benchmark: the floor's arithmetic, the gate, and a whole run on a tiny model. No test looks at a speed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.benchmarks.engine import measuring
from outrider.benchmarks.engine.floor import (
    Device,
    ForwardWork,
    forward_work,
    matrix_bytes,
    matrix_parameters,
    measure_device,
)
from outrider.benchmarks.engine.measuring import (
    Case,
    EngineGateError,
    check_against_single_tokens,
    check_draft_loop,
    draft,
    time_forward,
)
from outrider.benchmarks.engine.run import EnginePlan, floor_seconds, load, run_plan, to_result, to_rows
from outrider.errors import ConfigError
from outrider.kv_cache.state_slots import StateRows
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.layers.quantization import MXFP4, ONLINE
from outrider.model_executor.loader.model import QuantizationName
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import read_model_config
from tests.support.tiny_models import cached_tiny_model, load_reference

PLAN = EnginePlan(
    batch_sizes=(1, 3), num_tokens=(1, 5), contexts=(16,), draft_lengths=(3,), num_samples=2, num_warmups=1
)


@pytest.fixture
def runner() -> ModelRunner:
    return load(cached_tiny_model("qwen3"), PLAN, device="cpu", dtype="float32", page_size=16)


def test_counted_matrices_are_those_of_the_model() -> None:
    folder = cached_tiny_model("llama")
    config = ModelRunner.load(folder, num_pages=1, max_model_len=16).config
    reference = AutoModelForCausalLM.from_pretrained(folder)
    matrices = sum(p.numel() for name, p in reference.named_parameters() if ".layers." in name and p.dim() == 2)
    assert matrix_parameters(config, torch.float32) == matrices


def test_experts_are_counted_as_tokens_meet_them() -> None:
    """One token meets those that it chooses, many all of them."""
    folder = cached_tiny_model("qwen3_moe", mlp_only_layers=[1])
    config = ModelRunner.load(folder, num_pages=1, max_model_len=16).config
    assert config.experts is not None
    attention, mlp, router = 2 * 32 * 8 * 6, 3 * 32 * 48, 32 * config.experts.count
    for num_tokens, met in ((1, config.experts.num_chosen), (1000, config.experts.count)):
        expected = 2 * attention + mlp + router + 3 * met * 32 * 24
        assert matrix_parameters(config, torch.float32, num_tokens=num_tokens) == expected


def test_quantized_matrices_have_the_bytes_of_their_format() -> None:
    config = read_model_config(cached_tiny_model("gpt_oss", intermediate_size=64))
    assert config.experts is not None
    chosen = config.num_layers * config.experts.num_chosen * 3 * config.hidden_size * config.experts.intermediate_size
    dense = matrix_parameters(config, torch.float32) - chosen
    routers = config.num_layers * config.hidden_size * config.experts.count  # which no format covers
    for quantization, num_bytes in (
        (None, 2 * (dense + chosen)),
        (ONLINE, dense + routers + chosen),
        (MXFP4, 2 * dense + chosen * 17 // 32),
    ):
        assert matrix_bytes(replace(config, quantization=quantization), torch.bfloat16) == num_bytes


def test_hybrids_read_and_write_states() -> None:
    config = read_model_config(cached_tiny_model("qwen3_5_text"))
    assert config.recurrent is not None
    works = [forward_work(config, torch.bfloat16, batch_size=2, num_tokens=1, context=n, num_logits=1) for n in (8, 9)]
    state = config.recurrent.num_heads * config.recurrent.key_dim * config.recurrent.value_dim * 4
    states, attending = state * sum(config.recurrent.layers), config.recurrent.layers.count(False)
    kv = 2 * 2 * config.num_kv_heads * config.head_dim * attending
    assert works[1].num_bytes - works[0].num_bytes == 2 * kv
    weights = matrix_bytes(config, torch.bfloat16) + 2 * (config.vocab_size + 2) * config.hidden_size
    assert works[0].num_bytes == weights + 2 * 2 * states + 2 * 9 * kv


def test_work_is_bytes_and_operations_of_what_cannot_be_avoided(runner: ModelRunner) -> None:
    config = runner.config
    matrices, head = matrix_parameters(config, torch.float32), config.vocab_size * config.hidden_size
    kv = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    found = forward_work(config, torch.bfloat16, batch_size=3, num_tokens=5, context=40, num_logits=5)
    assert found.num_bytes == 2 * (matrices + head + 15 * config.hidden_size) + 15 * kv + 3 * 40 * kv
    attention = 2 * 2 * 15 * 40 * config.num_heads * config.head_dim * config.num_layers
    assert found.num_operations == 2 * 15 * (matrices + head) + attention
    without = forward_work(config, torch.bfloat16, batch_size=3, num_tokens=5, context=40, num_logits=0)
    assert found.num_bytes - without.num_bytes == 2 * head


def test_a_sliding_window_shortens_what_is_read() -> None:
    windowed = ModelRunner.load(cached_tiny_model("mistral", sliding_window=8), num_pages=16, max_model_len=16).config
    assert windowed.sliding_windows == (8, 8)
    short, long = (
        forward_work(windowed, torch.float32, batch_size=1, num_tokens=1, context=n, num_logits=1) for n in (8, 200)
    )
    assert short == long


def test_quantized_models_and_those_with_windows_are_measured() -> None:
    cases: tuple[tuple[str, dict[str, int], QuantizationName], ...] = (
        ("qwen3", {}, "fp8"), ("gpt_oss", {"sliding_window": 4}, "none")
    )  # fmt: skip
    for name, config, quantization in cases:
        folder = cached_tiny_model(name, **config)
        runner = load(folder, PLAN, device="cpu", dtype="float32", page_size=16, quantization=quantization)
        assert (runner.config.quantization is None) == (quantization == "none")
        assert len(run_plan(runner, PLAN)) == 2 + len(PLAN.forwards) + len(PLAN.draft_loops)


def test_the_floor_is_the_larger_of_the_two_times(runner: ModelRunner) -> None:
    device = Device(bytes_per_second=100.0, operations_per_second=1000.0)
    assert device.floor_seconds(ForwardWork(num_bytes=200, num_operations=1000)) == 2.0
    assert device.floor_seconds(ForwardWork(num_bytes=200, num_operations=5000)) == 5.0
    single = [floor_seconds(runner, device, "forward", Case(2, 1, context)) for context in (16, 17, 18)]
    assert floor_seconds(runner, device, "draft_loop", Case(2, 3, 16)) == pytest.approx(sum(single))


def test_a_whole_run_times_every_case_and_leaves_the_cache_free(runner: ModelRunner) -> None:
    done: list[None] = []
    series = run_plan(runner, PLAN, on_done=lambda: done.append(None))
    assert [item.name for item in series[:2]] == ["copy_bandwidth", "matrix_rate"]
    assert [item.name for item in series[2:]] == ["forward"] * 4 + ["draft_loop"] * 2
    assert len(done) == 6
    assert all(len(item.samples) == 2 for item in series[2:])
    runner.sequences.check_integrity()
    assert runner.sequences.pool.num_used == 0
    rows = to_rows(series)
    assert [row[1:4] for row in rows] == [(1, 1, 16), (1, 5, 16), (3, 1, 16), (3, 5, 16), (1, 3, 16), (3, 3, 16)]
    assert all(row[6] == pytest.approx(row[4] / row[5]) for row in rows)
    result = to_result(series, runner, name="some", configuration={"model": "tiny", "synthetic": False})
    assert result.configuration["dtype"] == "float32"


def test_a_timed_forward_is_the_forward_it_says(runner: ModelRunner) -> None:
    before = runner.num_forwards
    assert len(time_forward(runner, Case(2, 5, 16), num_samples=3, num_warmups=2)) == 3
    assert runner.num_forwards == before + 1 + 5, "one prefill of both sequences, then five goes"
    with pytest.raises(ConfigError, match="context"):
        time_forward(runner, Case(1, 5, 4), num_samples=1, num_warmups=0)


def test_a_timed_forward_replays_and_writes_states_as_a_decode_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = load(cached_tiny_model("qwen3_5_text"), PLAN, device="cpu", dtype="float32", page_size=16)
    plan, found = hybrid.sequences.plan_states, list[list[int]]()

    def planned(*arguments: Any) -> StateRows | None:
        rows = plan(*arguments)
        assert rows is not None
        found.extend(rows.numbers[1:].T.tolist())
        return rows

    monkeypatch.setattr(hybrid.sequences, "plan_states", planned)
    time_forward(hybrid, Case(1, 1, 16), num_samples=2, num_warmups=1)
    assert found[2:] == [[13, 14]] * 2


def test_the_draft_loop_drafts_what_greedy_decoding_would(runner: ModelRunner) -> None:
    prompt = [3, 1, 4, 1, 5]
    sequence = runner.sequences.open(16)
    runner.forward([ForwardRow(sequence, prompt[:-1], 0)])
    drafted = [tokens[0] for tokens in draft(runner, [sequence], prompt[-1:], 3)]
    reference, expected = load_reference(cached_tiny_model("qwen3")), list(prompt)
    for _ in range(3):
        with torch.inference_mode():
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    assert drafted == expected[len(prompt) :]


def test_the_gate_stops_an_engine_that_contradicts_itself(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_against_single_tokens(runner) < 1e-4
    forward = runner.forward

    def broken(rows: list[ForwardRow]) -> torch.Tensor:
        logits = forward(rows)
        return logits + 1.0 if len(rows[0].token_ids) > 1 else logits

    monkeypatch.setattr(runner, "forward", broken)
    with pytest.raises(EngineGateError, match="one at a time differ"):
        run_plan(runner, PLAN)


def test_the_gate_stops_a_draft_loop_that_is_not_greedy_decoding(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_draft_loop(runner) < 1e-4
    assert runner.sequences.pool.num_used == 0
    draft_once = measuring.draft

    def broken(*arguments: Any) -> list[list[int]]:
        first, *rest = draft_once(*arguments)
        return [[(first[0] + 1) % runner.config.vocab_size], *rest]

    monkeypatch.setattr(measuring, "draft", broken)
    with pytest.raises(EngineGateError, match="below the likeliest"):
        run_plan(runner, PLAN)


def test_auto_is_the_type_that_a_service_would_take() -> None:
    runner = load(cached_tiny_model("llama"), PLAN, device="cpu", dtype="auto", page_size=16)
    assert runner.dtype == torch.float32


def test_the_device_is_measured() -> None:
    device = measure_device(torch.device("cpu"), torch.float32)
    assert device.bytes_per_second > 0
    assert device.operations_per_second > 0


def test_one_row_may_be_longer_and_states_may_be_handed_out(runner: ModelRunner) -> None:
    plan = EnginePlan(
        (2,), (2,), (8,), draft_lengths=(), longest_contexts=(24,), layers=(1, 2), num_samples=1, num_warmups=0
    )
    found = run_plan(runner, plan)[2:]
    assert [(item.name, item.labels.get("longest_context")) for item in found] == [
        ("forward", None), ("forward", 24), ("forward_with_states", None), ("forward_with_states", 24)
    ]  # fmt: skip
    device = Device(1.0, 1e12)
    even, uneven = (floor_seconds(runner, device, "forward", Case(2, 2, 8, longest_context=n)) for n in (None, 24))
    config = runner.config
    kv_values = 2 * config.num_kv_heads * config.head_dim * config.num_layers
    assert uneven - even == (24 - 8) * kv_values * runner.dtype.itemsize
