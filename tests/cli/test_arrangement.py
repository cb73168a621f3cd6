"""Arrangements of several GPUs: which is chosen for which load, and the processes of replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.stack.arrangement import Arrangement, Load, arrange, model_of
from outrider.cli.stack.gpus import NO_GPUS, Gpus
from outrider.cli.stack.placement import place
from outrider.cli.stack.plan import plan_stack
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings, load, load_all
from outrider.errors import ConfigError, ModelError

H200 = 141 * 10**9
ONE, TWO, FOUR = (Gpus(("NVIDIA H200",) * count, (H200,) * count) for count in (1, 2, 4))
LARGE = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
SMALL = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256}
SEVENTY_B = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}


def folder(parent: Path, name: str, shape: Mapping[str, int], **more: Any) -> str:
    made = parent / name
    made.mkdir()
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    (made / "config.json").write_text(json.dumps({**shape, **heads, **more}))
    return str(made)


def arranged(
    parent: Path, gpus: Gpus, optimize: Load, shape: Mapping[str, int], flags: Mapping[tuple[str, str], Any] = {}
) -> Arrangement:
    models = {
        ("target", "model"): folder(parent, "t", shape),
        ("draft", "model"): folder(parent, "d", SMALL, tie_word_embeddings=True),
    }
    effective = load_all({**models, **flags}, environ={})
    return arrange(effective.settings, gpus, optimize, effective.origins)


def test_the_size_of_a_model_is_that_of_its_files_or_of_its_shapes(tmp_path: Path) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    found = model_of(made, "target")
    assert found.num_bytes == pytest.approx(16.06e9, rel=0.001)
    assert (found.num_layers, found.num_kv_heads) == (32, 8)
    (made / "a.safetensors").write_bytes(b"x" * 10)
    (made / "b.safetensors").write_bytes(b"x" * 5)
    assert model_of(made, "target").num_bytes == 15


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": "many"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": -8},
        {"num_hidden_layers": 1e400},
        {"hidden_size": [1]},
        {"vocab_size": 10**400},
        {"head_dim": {}},
    ],
)
def test_a_shape_that_is_none_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    (made / "config.json").write_text(json.dumps({**json.loads((made / "config.json").read_text()), **change}))
    with pytest.raises(ModelError, match=rf"draft model: .*config.json: {next(iter(change))} should be") as found:
        model_of(made, "draft")
    assert "\n" not in str(found.value)


def test_a_large_config_is_not_read(tmp_path: Path) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    with (made / "config.json").open("ab") as file:
        file.truncate(1 << 40)  # sparse: reading it whole would take all memory
    with pytest.raises(ModelError, match=r"target model: .* has more than"):
        model_of(made, "target")


def test_a_weight_file_that_is_a_link_to_nowhere_is_one_line(tmp_path: Path) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    (made / "a.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"target model: .*a.safetensors cannot be read: No such file"):
        model_of(made, "target")


def test_a_large_target_is_on_all_gpus_for_latency(tmp_path: Path) -> None:
    found = arranged(tmp_path, TWO, "latency", LARGE)
    placed = place(found.settings, TWO)
    target, draft = placed.settings.target, placed.settings.draft
    assert (target.device, target.tensor_parallel_size, draft.device) == ("cuda:0", 2, "cuda:0")
    assert (target.gpu_memory_utilization, draft.gpu_memory_utilization) == (0.7, 0.2)
    assert found.replica_devices == ()
    assert "for latency the target is on all 2 GPUs and the draft on one of them" in found.reason
    assert "reads 16.1 GB a step, of which 2 GPUs save 2 ms, and sums between them cost 0.64 ms" in found.reason


def test_a_small_target_is_apart_from_its_draft_for_latency(tmp_path: Path) -> None:
    found = arranged(tmp_path, TWO, "latency", SMALL)
    placed = place(found.settings, TWO).settings
    assert (placed.target.device, placed.target.tensor_parallel_size, placed.draft.device) == ("cuda:0", 1, "cuda:1")
    assert "the models are apart" in found.reason


def test_heads_bound_the_number_of_gpus(tmp_path: Path) -> None:
    six = Gpus(("NVIDIA H200",) * 6, (H200,) * 6)
    found = arranged(tmp_path, six, "latency", SEVENTY_B)
    assert found.settings.target.tensor_parallel_size == 4
    assert "for latency the target is on 4 of the 6 GPUs and the draft on one of them" in found.reason


def test_every_gpu_has_a_replica_for_throughput(tmp_path: Path) -> None:
    found = arranged(tmp_path, FOUR, "throughput", LARGE)
    assert found.replica_devices == ("cuda:1", "cuda:2", "cuda:3")
    assert "each of the 4 GPUs has a replica of its own" in found.reason


def test_a_target_without_room_for_replicas_is_on_all_gpus(tmp_path: Path) -> None:
    found = arranged(tmp_path, TWO, "throughput", SEVENTY_B)
    assert (found.settings.target.tensor_parallel_size, found.replica_devices) == (2, ())
    assert "no GPU has room for a replica" in found.reason


@pytest.mark.parametrize("gpus", [NO_GPUS, ONE])
def test_fewer_than_two_gpus_leave_no_choice(gpus: Gpus, tmp_path: Path) -> None:
    found = arranged(tmp_path, gpus, "throughput", LARGE)
    assert found.replica_devices == ()
    assert found.reason.endswith("chooses nothing with " + ("1 GPU" if len(gpus) else "0 GPUs"))


@pytest.mark.parametrize(
    ("place_of", "value"),
    [
        (("target", "device"), "cuda:1"),
        (("target", "tensor_parallel_size"), 2),
        (("draft", "tensor_parallel_size"), 2),
    ],
)
def test_models_that_are_placed_already_are_refused(place_of: tuple[str, str], value: object, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"--optimize: chooses where the models run, and {'.'.join(place_of)} is set"
    ):
        arranged(tmp_path, TWO, "latency", LARGE, {place_of: value})


def test_replicas_are_processes_that_one_coordinator_uses() -> None:
    flags = {
        ("target", "model"): "/t",
        ("draft", "model"): "/d",
        ("target", "device"): "cuda:0",
        ("draft", "device"): "cuda:0",
        ("target", "port"): 7001,
        ("target", "metrics_port"): 7002,
        ("draft", "trace_file"): "/tmp/draft.json",
    }
    effective = load_all(flags, environ={})
    ports = iter(range(9001, 9010))
    made = plan_stack(
        effective.settings,
        explicit=effective.origins,
        free_port=lambda: next(ports),
        replica_devices=("cuda:1",),
    )
    assert [spec.name for spec in made.models] == ["target-1", "target-2", "draft-1", "draft-2"]
    targets = [load(TargetSettings, spec.argv, {}) for spec in made.models[:2]]
    drafts = [load(DraftSettings, spec.argv, {}) for spec in made.models[2:]]
    assert [each.device for each in targets] == [each.device for each in drafts] == ["cuda:0", "cuda:1"]
    assert targets[0].metrics_port == 7002
    ports_used = [*(each.port for each in targets), *(each.port for each in drafts)]
    assert len({*ports_used, *(each.metrics_port for each in targets)}) == 6
    assert [each.trace_file for each in drafts] == ["/tmp/draft.json", "/tmp/draft-2.json"]
    coordinator = load(CoordinatorSettings, made.coordinators[0].argv, {})
    assert coordinator.target_address == ",".join(spec.address for spec in made.models[:2])
    assert coordinator.draft_address == ",".join(spec.address for spec in made.models[2:])
