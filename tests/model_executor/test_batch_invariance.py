"""Batch invariance: the models that support it, and what a setting means for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from outrider.cli.facts import placement_text, repetition_text
from outrider.config import DraftSettings, TargetSettings
from outrider.errors import ConfigError, OutriderError
from outrider.generation import ModelPlacement
from outrider.kernels.invariance import obstacle
from outrider.model_executor.distributed.communicator import Communicator
from outrider.model_executor.distributed.device_communicators import GpuCommunicator
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.layers.fp8 import Fp8Linear
from outrider.model_executor.layers.linear_method import Features, LinearSpec
from outrider.model_executor.layers.linear_methods import UnquantizedLinear
from outrider.model_executor.layers.quantization import ONLINE
from outrider.model_executor.loader.model import BatchInvariance, is_batch_invariant, load_model
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import read_model_config
from tests.support.tiny_models import cached_tiny_model

GPU = torch.device("cuda")
ONLINE_FP8 = partial(Fp8Linear, ONLINE)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compute capability of every GPU."""
    found = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(found))
    return found


def test_hopper_in_16_bits_keeps_the_order_of_sums(capability: list[int]) -> None:
    assert obstacle(GPU, torch.bfloat16) is None
    assert obstacle(GPU, torch.float16) is None


@pytest.mark.parametrize(
    ("device", "dtype", "named"),
    [(GPU, torch.float32, "not float32"), (torch.device("cpu"), torch.float32, "needs a GPU")],
)
def test_obstacles_are_named(device: torch.device, dtype: torch.dtype, named: str, capability: list[int]) -> None:
    assert named in str(obstacle(device, dtype))


def test_other_gpus_are_refused(capability: list[int]) -> None:
    capability[0] = 8
    assert "capability 9.0" in str(obstacle(GPU, torch.bfloat16))


@pytest.mark.parametrize(
    ("setting", "num_ranks", "expected"),
    [("auto", 1, True), ("auto", 2, False), ("on", 2, True), ("on", 4, True), ("off", 1, False)],
)
def test_auto_is_on_where_it_costs_little(
    setting: BatchInvariance, num_ranks: int, capability: list[int], *, expected: bool
) -> None:
    config = replace(read_model_config(cached_tiny_model()), hidden_size=4096)
    assert is_batch_invariant(setting, config, torch.bfloat16, GPU, num_ranks=num_ranks) is expected


@pytest.mark.parametrize(
    ("architecture", "hidden_size", "head_dim"),
    [("llama", 2048, 64), ("llama", 4096, 256), ("qwen3_moe", 4096, 128), ("qwen3_5_text", 4096, 128)],
)
def test_auto_is_off_where_the_cost_was_not_measured(
    architecture: str, hidden_size: int, head_dim: int, capability: list[int]
) -> None:
    config = read_model_config(cached_tiny_model(architecture))
    config = replace(config, hidden_size=hidden_size, head_dim=head_dim)
    assert not is_batch_invariant("auto", config, torch.bfloat16, GPU, num_ranks=1)
    assert is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)


def test_heads_that_were_not_compared_are_refused(capability: list[int]) -> None:
    config = replace(read_model_config(cached_tiny_model()), hidden_size=4096, head_dim=512)
    with pytest.raises(ConfigError, match="heads of 512 values was not compared"):
        is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)
    config = read_model_config(cached_tiny_model("gemma3_text"))
    assert is_batch_invariant("on", replace(config, head_dim=256), torch.bfloat16, GPU, num_ranks=1)


@pytest.mark.parametrize("head_dim", [24, 40, 48, 72, 96, 112, 160, 192])
def test_auto_is_off_for_heads_that_were_not_compared(head_dim: int, capability: list[int]) -> None:
    config = replace(read_model_config(cached_tiny_model()), hidden_size=4096, head_dim=head_dim)
    assert not is_batch_invariant("auto", config, torch.bfloat16, GPU, num_ranks=1)
    with pytest.raises(ConfigError, match=f"heads of {head_dim} values was not compared .* 64, 80, 128 and 256 were"):
        is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)


def test_auto_is_off_for_quantized_weights(capability: list[int]) -> None:
    config = replace(read_model_config(cached_tiny_model()), hidden_size=4096, quantization=ONLINE)
    assert not is_batch_invariant("auto", config, torch.bfloat16, GPU, num_ranks=1)
    assert is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)


def test_norms_over_heads_of_several_ranks_are_refused(capability: list[int]) -> None:
    config = read_model_config(cached_tiny_model("olmo2"))
    assert is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)
    with pytest.raises(ConfigError, match="normalised over heads of several ranks"):
        is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=2)


def test_an_fp8_cache_keeps_the_order_where_it_is_asked_for(capability: list[int]) -> None:
    config = replace(read_model_config(cached_tiny_model()), hidden_size=4096)
    cases: list[tuple[BatchInvariance, torch.dtype, bool]] = [
        ("auto", torch.float8_e4m3fn, False), ("auto", torch.bfloat16, True), ("on", torch.float8_e4m3fn, True),
    ]  # fmt: skip
    for setting, cached, expected in cases:
        found = is_batch_invariant(setting, config, torch.bfloat16, GPU, num_ranks=1, cached_dtype=cached)
        assert found is expected


@pytest.mark.parametrize(("method", "taken", "refused"), [(UnquantizedLinear, 24, 20), (ONLINE_FP8, 32, 24)])
def test_layers_whose_rows_the_kernels_cannot_load_are_refused(
    method: Callable[[LinearSpec], object], taken: int, refused: int
) -> None:
    def make(columns: int, *, batch_invariant: bool, num_experts: int = 0) -> object:
        outputs = (Features.all(4, "down_proj"),)
        return method(
            LinearSpec(
                Features.all(columns), outputs, 4, has_bias=False, dtype=torch.bfloat16, device=torch.device("cpu"),
                module="mlp.", batch_invariant=batch_invariant, num_experts=num_experts,
            )
        )  # fmt: skip

    make(taken, batch_invariant=True)
    make(refused, batch_invariant=False)
    make(refused, batch_invariant=True, num_experts=2)  # whose kernels take any
    with pytest.raises(ConfigError, match=f"batch_invariant: cannot be on: mlp.down_proj has {refused} columns"):
        make(refused, batch_invariant=True)


def test_a_model_on_a_cpu_is_loaded_without_or_refused() -> None:
    folder = cached_tiny_model()
    with pytest.raises(ConfigError, match="batch_invariant: cannot be on: it needs a GPU"):
        ModelRunner.load(folder, device="cpu", num_pages=4, batch_invariant="on")
    assert not ModelRunner.load(folder, device="cpu", num_pages=4, batch_invariant="auto").batch_invariant


class FourRanks:
    """Ranks that share a model, as the first sees them, with a communicator of each kind."""

    publish = None

    def __init__(self) -> None:
        self.plain = GpuCommunicator(Shard(0, 4), None, 0)
        self.ordered = GpuCommunicator(Shard(0, 4), None, 0)
        self.plain.in_rank_order = lambda: self.ordered  # type: ignore[method-assign]

    def open_communicator(self, device: torch.device, dtype: torch.dtype) -> Communicator:
        return self.plain

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_batch_invariant_model_gets_sums_in_rank_order(
    setting: BatchInvariance, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Communicator] = []

    def make_decoder(*_: object, communicator: Communicator, **__: object) -> None:
        given.append(communicator)
        raise InterruptedError

    monkeypatch.setattr("outrider.model_executor.loader.model.Decoder", make_decoder)
    monkeypatch.setattr("outrider.model_executor.loader.model.obstacle", lambda *_: None)
    ranks = FourRanks()
    with pytest.raises(InterruptedError):
        load_model(cached_tiny_model(), num_pages=4, ranks=ranks, batch_invariant=setting)
    assert given == [ranks.ordered if setting == "on" else ranks.plain]


def test_yaml_writes_the_setting_as_a_boolean() -> None:
    values: dict[str, object] = {"model": "folder", "batch_invariant": True}
    assert TargetSettings.model_validate(values).batch_invariant == "on"
    assert DraftSettings.model_validate(values | {"batch_invariant": False}).batch_invariant == "off"


def test_drafts_without_a_model_of_their_own_have_no_such_mode() -> None:
    with pytest.raises((ValueError, OutriderError), match="batch_invariant"):
        DraftSettings.model_validate({"method": "ngram", "batch_invariant": "on"})


def test_the_mode_is_shown_beside_the_type() -> None:
    placement = ModelPlacement(device="cuda:0", dtype="bfloat16", batch_invariant=True)
    assert "bfloat16, batch-invariant, KV cache" in placement_text(placement)


@pytest.mark.parametrize("mode", [False, True])
def test_what_repeats_follows_the_mode(*, mode: bool) -> None:
    placement = ModelPlacement(device="cuda:0", dtype="bfloat16", batch_invariant=mode)
    assert ("in any batch" in repetition_text(placement)) is mode


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_that_no_gpu_compared_are_told(num_ranks: int) -> None:
    placement = ModelPlacement(device="cuda:0", dtype="bfloat16", batch_invariant=True, tensor_parallel_size=num_ranks)
    assert ("more than two ranks were compared on CPUs only" in repetition_text(placement)) is (num_ranks > 2)


def test_code_of_transformers_is_refused(capability: list[int]) -> None:
    config = replace(read_model_config(cached_tiny_model()), is_fallback=True)
    with pytest.raises(ConfigError, match="promises no order of sums"):
        is_batch_invariant("on", config, torch.bfloat16, GPU, num_ranks=1)
    assert not is_batch_invariant("auto", config, torch.bfloat16, GPU, num_ranks=1)
