"""The runner's promises beside its logits: what it refuses, what a failure leaves, how big the pool is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError, InvalidRequestError, ModelError
from outrider.kv_cache import KVSequence
from outrider.kv_cache.sizing import KVCacheRequest
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.kv_cache_sizing import choose_num_pages
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import AttentionWindow, read_model_config
from tests.model_executor.parity import build, poisoned_runner, random_ids, reference_logits

CPU = torch.device("cpu")
ON_A_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: [ForwardRow(s, [1, 272])], "272 is not from 0 to 271"),
        (lambda s: [ForwardRow(s, [-1])], "-1 is not from 0 to 271"),
        (lambda s: [ForwardRow(s, [])], "at least one token"),
        (lambda s: [ForwardRow(s, [1] * 21)], "pass the max_length of 25"),
        (lambda s: [ForwardRow(s, [1], 2)], "must be from 0 to 1"),
    ],
)
def test_a_bad_row_is_refused_before_anything_changes(
    spoil: Callable[[KVSequence], list[ForwardRow]], message: str
) -> None:
    runner = poisoned_runner(build("llama"), page_size=4)
    healthy, sequence = runner.sequences.open(25), runner.sequences.open(25)
    runner.forward([ForwardRow(sequence, [1, 2, 3, 4, 5])])
    with pytest.raises(InvalidRequestError, match=message):
        runner.forward([ForwardRow(healthy, [1]), *spoil(sequence)])
    assert (healthy.length, sequence.length, runner.num_forwards) == (0, 5, 1)
    runner.sequences.check_integrity()


def test_positions_past_max_model_len_are_refused_even_when_reserved() -> None:
    runner = ModelRunner.load(build("llama"), page_size=4, num_pages=100, max_model_len=10)
    sequence = runner.sequences.open(20)
    runner.forward([ForwardRow(sequence, [1] * 10)])
    with pytest.raises(InvalidRequestError, match="11 tokens pass max_model_len 10"):
        runner.forward([ForwardRow(sequence, [1])])
    assert sequence.length == 10


def test_a_forward_that_fails_midway_leaves_the_lengths_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("llama")
    runner = poisoned_runner(folder, page_size=4)
    sequence = runner.sequences.open(20)
    runner.forward([ForwardRow(sequence, [1, 2, 3])])

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.worker, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.forward([ForwardRow(sequence, [4, 5])])
    assert (sequence.token_ids, runner.num_forwards) == ([1, 2, 3], 1)
    logits = runner.forward([ForwardRow(sequence, [6])])
    torch.testing.assert_close(logits.clone(), reference_logits(folder, [1, 2, 3, 6])[-1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_dummy_weights_need_no_files_and_are_used_whole(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((build(architecture) / "config.json").read_bytes())
    with pytest.raises(ModelError):
        ModelRunner.load(tmp_path, page_size=4, num_pages=8)
    found = []
    for _ in range(2):
        runner = ModelRunner.load(tmp_path, page_size=4, num_pages=8, load_format="dummy")
        found.append(runner.forward([ForwardRow(runner.sequences.open(9), [3, 1, 2], 3)]).clone())
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert found[0].std() > 0.1


def test_warming_up_leaves_no_trace() -> None:
    runner = poisoned_runner(build("llama"), page_size=4)
    runner.warm_up()
    assert (runner.num_forwards, len(runner.sequences), runner.sequences.pool.num_used) == (0, 0, 0)


def test_warming_up_fits_a_pool_of_one_token() -> None:
    runner = ModelRunner.load(build("llama"), page_size=1, num_pages=1)
    runner.warm_up()
    assert runner.sequences.pool.num_used == 0


def test_bfloat16_follows_float32() -> None:
    folder = build("llama")
    runner = ModelRunner.load(folder, dtype="bfloat16", page_size=4, num_pages=50)
    assert runner.dtype == runner.kv_cache.dtype == torch.bfloat16
    text = random_ids(40, seed=1)
    sequence = runner.sequences.open(40)
    rows = [text[:30], text[30:31], text[31:40]]
    logits = torch.cat([runner.forward([ForwardRow(sequence, part, len(part))]) for part in rows])
    assert logits.dtype == torch.float32
    expected = reference_logits(folder, text)
    assert (logits - expected).abs().max() < 0.2
    assert (logits - expected).abs().mean() < 0.02


def test_two_models_live_in_one_process() -> None:
    folders = build("llama"), build("qwen3")
    runners = [poisoned_runner(folder, page_size=4 + index) for index, folder in enumerate(folders)]
    sequences = [runner.sequences.open(9) for runner in runners]
    for part in ([1, 2, 3], [4, 5], [6]):
        for folder, runner, sequence in zip(folders, runners, sequences, strict=True):
            logits = runner.forward([ForwardRow(sequence, part)])
            expected = reference_logits(folder, sequence.token_ids)[-1:]
            torch.testing.assert_close(logits.clone(), expected, atol=1e-4, rtol=0)


def request(**changes: float | None) -> KVCacheRequest:
    defaults = {"page_size": 16, "max_model_len": 100, "bytes_per_token": 10, "num_pages": None, "kv_cache_bytes": None}
    return KVCacheRequest(**{**defaults, **changes})  # type: ignore[arg-type]


def test_the_pool_is_sized_by_pages_by_bytes_or_by_memory() -> None:
    assert choose_num_pages(request(num_pages=3), CPU) == 3
    assert choose_num_pages(request(kv_cache_bytes=16 * 10 * 9 + 5), CPU) == 9
    assert choose_num_pages(request(), CPU) == 256 * 7
    assert choose_num_pages(request(max_sequences=40), CPU) == 40 * 7


def test_a_default_pool_keeps_to_its_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.model_executor.kv_cache_sizing.available_host_bytes", lambda: 4 * 16 * 10 * 20)
    assert choose_num_pages(request(), CPU) == 20


@pytest.mark.parametrize(
    ("share", "free", "num_pages"),
    [(None, 16_000, 85), (0.5, 90_000, 100), (0.5, 8_000, 47), (0.6, 90_000, 162), (0.4, 90_000, 37)],
)
def test_a_share_of_a_gpu_is_of_all_it_has_less_what_is_taken_here(
    share: float | None, free: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 34_000)
    asked = request(max_model_len=50, gpu_memory_utilization=share)
    assert choose_num_pages(asked, torch.device("cuda")) == num_pages


def test_a_device_without_room_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 29, 80 << 30))
    monkeypatch.setattr("outrider.model_executor.worker.KVCacheTensors", refuse)
    with pytest.raises(ConfigError, match=r"1\.5 of the 80\.0 GiB of cpu are free.*gpu_memory_utilization"):
        ModelRunner.load(build("llama"), num_pages=4)


def test_the_chosen_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider.model_executor.kv_cache_sizing"):
        choose_num_pages(request(num_pages=3), CPU)
    assert "3 pages of 16 tokens" in caplog.text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_cache_bytes": 16 * 10 * 6}, "kv_cache_bytes"),
        ({"num_pages": 0}, "num_pages"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_sizes_that_cannot_be_served_are_refused(changes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_num_pages(request(**changes), CPU)
    assert raised.value.field == field


@pytest.mark.parametrize(("setting", "value"), [("max_model_len", 257), ("max_model_len", 0), ("dtype", "int8")])
def test_settings_that_do_not_fit_the_model_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelRunner.load(build("llama"), num_pages=4, **{setting: value})  # type: ignore[arg-type]
    assert raised.value.field == setting


def test_an_attention_window_hides_what_is_between_it_and_the_sinks() -> None:
    """The same in one forward as token by token, the whole model's within the window, and other logits beyond."""
    folder, ids = build("llama"), random_ids(30, seed=5)
    windowed = ModelRunner.load(folder, page_size=4, num_pages=40, attention_window=AttentionWindow(8, 3))
    whole = ModelRunner.load(folder, page_size=4, num_pages=40)
    assert (windowed.kv_cache.layout.windows, windowed.kv_cache.layout.sinks) == ((8,), (3,))
    at_once = windowed.forward([ForwardRow(windowed.sequences.open(30), ids, 30)])
    sequence = windowed.sequences.open(30)
    one_by_one = torch.cat([windowed.forward([ForwardRow(sequence, [token], 1)]) for token in ids])
    torch.testing.assert_close(one_by_one, at_once, atol=1e-4, rtol=1e-4)
    plain = whole.forward([ForwardRow(whole.sequences.open(30), ids, 30)])
    torch.testing.assert_close(at_once[:8], plain[:8], atol=1e-4, rtol=1e-4)
    assert ((at_once[11:] - plain[11:]).abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_pages_that_leave_the_window_are_given_back_and_never_read(device: str) -> None:
    """Free pages are NaN, and logits those of a runner that keeps all pages; 250 tokens hold 24 pages."""
    folder, ids = build("llama"), random_ids(300, seed=5)
    load = partial(ModelRunner.load, folder, device=device, dtype="float32", page_size=4, num_pages=80)
    runner, keeps_all = (load(attention_window=AttentionWindow(20, 5)) for _ in range(2))
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-5 if device == "cpu" else 2e-4)
    sequence, whole = runner.sequences.open(256), keeps_all.sequences.open(256)
    for start, stop in [(0, 30), *((n, n + 1) for n in range(30, 150)), *((n, n + 5) for n in range(150, 250, 5))]:
        logits = runner.forward([ForwardRow(sequence, ids[start:stop], stop - start)])
        expected = keeps_all.forward([ForwardRow(whole, ids[start:stop], stop - start)])
        assert_close(logits, expected)
        runner.sequences.commit(sequence, stop)
        runner.sequences.check_integrity()
        with torch.inference_mode():
            for page in set(range(80)) - set(sequence.held_pages()):
                for group in runner.kv_cache.groups:
                    group[:, 4 * page : 4 * (page + 1)] = torch.nan
    assert (runner.sequences.num_pages(sequence), keeps_all.sequences.num_pages(whole)) == (24, 63)
    runner.sequences.truncate(sequence, 250 - 64)
    with pytest.raises(InvalidRequestError, match="were given back"):
        runner.sequences.truncate(sequence, 250 - 64 - 8)
    logits = runner.forward([ForwardRow(sequence, ids[186:190], 4)])
    keeps_all.sequences.truncate(whole, 186)
    assert_close(logits, keeps_all.forward([ForwardRow(whole, ids[186:190], 4)]))


def test_a_layer_with_a_narrower_window_of_its_own_keeps_it() -> None:
    config = read_model_config(build("mistral", sliding_window=6))
    assert replace(config, attention_window=AttentionWindow(8, 3)).reach(0) == (6, 0)
    assert replace(config, attention_window=AttentionWindow(5, 3)).reach(0) == (5, 3)
    assert config.reach(0) == (6, 0)
