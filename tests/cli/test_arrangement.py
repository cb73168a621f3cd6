"""Arrangements of several GPUs: which is chosen for which load, and the processes of replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.cli.stack.arrangement import Arrangement, Load, arrange, model_of
from outrider.cli.stack.gpus import NO_GPUS, Gpus
from outrider.cli.stack.placement import place
from outrider.cli.stack.plan import plan_stack
from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings, load, load_all
from outrider.config.fields import DraftAhead
from outrider.errors import ConfigError, ModelError
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.process.model_files import weight_files

H200 = 141 * 10**9
ONE, TWO, FOUR = (Gpus(("NVIDIA H200",) * count, (H200,) * count) for count in (1, 2, 4))
LARGE = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
SMALL = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256}
SEVENTY_B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "num_attention_heads": 64,
}


def folder(parent: Path, name: str, shape: Mapping[str, int], **more: Any) -> str:
    made = parent / name
    made.mkdir()
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    (made / "config.json").write_text(json.dumps({**heads, **shape, **more}))
    return str(made)


def cards(count: int, gigabytes: int) -> Gpus:
    return Gpus(("GPU",) * count, (gigabytes * 10**9,) * count)


def arranged(
    parent: Path,
    gpus: Gpus,
    optimize: Load | None,
    shape: Mapping[str, int],
    flags: Mapping[tuple[str, str], Any] = {},
    **more: Any,
) -> Arrangement:
    models = {
        ("target", "model"): folder(parent, "t", shape, **more),
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
    assert model_of(made, "target", has_weights=False).num_bytes == found.num_bytes
    assert model_of(made, "target", dtype="float32").num_bytes == 30


@pytest.mark.parametrize(("index", "expected"), [(None, 4), ("model-1.safetensors", 2)])
def test_only_weights_that_the_loader_reads_count(index: str | None, expected: int, tmp_path: Path) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    for tensor, name in enumerate(("consolidated", "model-1", "model")):
        save_file({str(tensor): torch.zeros(1 << tensor, dtype=torch.uint8)}, made / f"{name}.safetensors")
    if index is not None:
        (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"1": index}}))
    read = read_tensors(made)
    assert sum(tensor.num_bytes for tensor in read.values()) == expected
    assert set(weight_files(made)) == {tensor.file for tensor in read.values()}
    assert model_of(made, "target").num_bytes == sum(path.stat().st_size for path in weight_files(made))


def test_a_file_that_an_index_names_and_that_is_missing_is_one_line(tmp_path: Path) -> None:
    made = Path(folder(tmp_path, "m", LARGE))
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": 5}}))
    with pytest.raises(ModelError, match=r"target model: .*a.safetensors cannot be read: No such file"):
        model_of(made, "target")
    assert model_of(made, "target", has_weights=False).num_bytes == pytest.approx(16.06e9, rel=0.001)


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
    assert placed.coordinator.draft_ahead is DraftAhead.AUTO


def test_drafting_ahead_is_chosen_for_a_draft_apart_alone_and_where_nobody_chose(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "named")]
    for each in folders:
        each.mkdir()
    found = arranged(folders[0], TWO, "latency", LARGE)
    assert found.settings.coordinator.draft_ahead is DraftAhead.VERDICT
    found = arranged(folders[1], TWO, "latency", SMALL, {("coordinator", "draft_ahead"): "in_turn"})
    assert found.settings.coordinator.draft_ahead is DraftAhead.IN_TURN


def test_heads_bound_the_number_of_gpus(tmp_path: Path) -> None:
    six = Gpus(("NVIDIA H200",) * 6, (H200,) * 6)
    found = arranged(tmp_path, six, "latency", SEVENTY_B)
    assert found.settings.target.tensor_parallel_size == 4
    assert "for latency the target is on 4 of the 6 GPUs and the draft on another one" in found.reason
    assert found.reason.endswith("and its 8 KV heads do not divide over 6 GPUs")
    placed = place(found.settings, six).settings
    assert (placed.draft.device, placed.coordinator.draft_ahead) == ("cuda:4", DraftAhead.AUTO)


def test_a_draft_has_the_gpu_that_a_target_leaves_over_and_none_that_it_takes(tmp_path: Path) -> None:
    for count, expected in [(2, "cuda:0"), (3, "cuda:2"), (4, "cuda:0"), (5, "cuda:4"), (8, "cuda:0")]:
        parent = tmp_path / str(count)
        parent.mkdir()
        found = arranged(parent, cards(count, 141), "latency", LARGE)
        placed = place(found.settings, cards(count, 141)).settings
        assert placed.target.tensor_parallel_size == count // 2 * 2
        assert placed.draft.device == expected


@pytest.mark.parametrize(
    ("gigabytes", "flags", "devices"),
    [
        (141, {}, ("cuda:0", "cuda:0")),
        (28, {}, ("cuda:0", "cuda:1")),  # 18.5 GB of weights, and 16.8 for them
        (141, {("coordinator", "draft_ahead"): "chain"}, ("cuda:0", "cuda:1")),
        (141, {("coordinator", "draft_ahead"): "verdict"}, ("cuda:0", "cuda:0")),
        (141, {("draft", "device"): "cuda:1"}, ("cuda:0", "cuda:1")),
        (141, {("target", "tensor_parallel_size"): 2}, ("cuda:0", "cuda:2")),
        (141, {("target", "kv_cache_bytes"): 10**11}, ("cuda:0", "cuda:1")),
    ],
)
def test_unasked_both_models_share_a_gpu_that_has_room(
    gigabytes: int, flags: dict[tuple[str, str], Any], devices: tuple[str, str], tmp_path: Path
) -> None:
    gpus = cards(4, gigabytes)
    found = arranged(tmp_path, gpus, None, LARGE, flags)
    placed = place(found.settings, gpus).settings
    assert (placed.target.device, placed.draft.device) == devices
    shares = devices[0] == devices[1]
    assert found.reason == (
        "target and draft share the first GPU: 18.5 GB of weights leave room for their KV caches;"
        " --optimize latency or throughput uses the other GPUs too"
        if shares
        else ""
    )
    assert (placed.target.gpu_memory_utilization, placed.draft.gpu_memory_utilization) == (
        (0.7, 0.2) if shares else (None, None)
    )


def test_unasked_nothing_is_chosen_without_a_draft_model_or_a_second_gpu(tmp_path: Path) -> None:
    assert arranged(tmp_path, ONE, None, LARGE).reason == ""
    flags = {("target", "model"): folder(tmp_path, "alone", LARGE), ("draft", "method"): "ngram"}
    effective = load_all(flags, environ={})
    assert arrange(effective.settings, TWO, None, effective.origins) == Arrangement(effective.settings)


@pytest.mark.parametrize("optimize", ["latency", "throughput"])
def test_heads_that_do_not_divide_are_the_reason_for_one_gpu(optimize: Load, tmp_path: Path) -> None:
    shape = {**LARGE, "num_hidden_layers": 200}  # too large for replicas
    found = arranged(tmp_path, TWO, optimize, shape, {}, num_key_value_heads=5)
    assert found.settings.target.tensor_parallel_size == 1
    assert f"for {optimize} the models are apart: the target reads " in found.reason
    assert found.reason.endswith("and its 5 KV heads do not divide over 2 GPUs")
    assert "save 0 ms" not in found.reason


def test_weights_without_room_beside_a_draft_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        arranged(tmp_path, cards(2, 80), "latency", SEVENTY_B)
    assert str(found.value) == (
        "--optimize: finds no room for the weights: where the target is on all 2 GPUs and the draft on one of them, "
        "the target needs 70.6 GB on each of them and has 56.0 GB; where the models are apart, "
        "the target needs 141.1 GB and has 80.0 GB"
    )


def test_a_draft_has_a_gpu_of_its_own_where_it_lacks_room_beside_the_target(tmp_path: Path) -> None:
    found = arranged(tmp_path, cards(4, 12), "latency", LARGE)
    placed = place(found.settings, cards(4, 12)).settings
    assert (placed.target.device, placed.target.tensor_parallel_size, placed.draft.device) == ("cuda:0", 2, "cuda:2")
    assert found.reason.startswith(
        "for latency the target is on 2 of the 4 GPUs and the draft on another one: where the target is on all 4 GPUs"
        " and the draft on one of them, the draft needs 2.5 GB and has 2.4 GB"
    )


def test_a_target_that_is_too_large_for_a_gpu_is_on_both_though_sums_cost_more(tmp_path: Path) -> None:
    shape = {**LARGE, "num_hidden_layers": 60, "hidden_size": 2048, "intermediate_size": 18432}
    found = arranged(tmp_path, cards(2, 15), "latency", shape)
    assert found.settings.target.tensor_parallel_size == 2
    assert "where the models are apart, the target needs 15.9 GB and has 15.0 GB" in found.reason


def test_the_share_that_is_given_bounds_the_weights(tmp_path: Path) -> None:
    effective = load_all({("target", "model"): folder(tmp_path, "t", LARGE)}, environ={})
    with pytest.raises(ConfigError, match=r"needs 8\.0 GB on each of them and has 7\.0 GB"):
        arrange(effective.settings, TWO, "latency", effective.origins, gpu_memory_utilization=0.05)
    sized = load_all({("target", "model"): effective.settings.target.model, ("target", "num_pages"): 9}, environ={})
    arrange(sized.settings, TWO, "latency", sized.origins, gpu_memory_utilization=0.05)


def test_without_a_draft_model_none_is_placed(tmp_path: Path) -> None:
    flags = {("target", "model"): folder(tmp_path, "t", LARGE), ("draft", "method"): "ngram"}
    effective = load_all(flags, environ={})
    found = arrange(effective.settings, TWO, "latency", effective.origins)
    assert found.reason.startswith("for latency the target is on all 2 GPUs: ")


def test_every_gpu_has_a_replica_for_throughput(tmp_path: Path) -> None:
    found = arranged(tmp_path, FOUR, "throughput", LARGE)
    assert found.replica_devices == ("cuda:1", "cuda:2", "cuda:3")
    assert "each of the 4 GPUs has a replica of its own" in found.reason


def test_a_target_that_is_too_large_for_a_gpu_has_replicas_on_several(tmp_path: Path) -> None:
    found = arranged(tmp_path, FOUR, "throughput", SEVENTY_B)
    assert (found.settings.target.tensor_parallel_size, found.replica_devices) == (2, ("cuda:2",))
    placed = place(found.settings, FOUR).settings
    assert (placed.target.device, placed.draft.device) == ("cuda:0", "cuda:0")
    assert (placed.target.gpu_memory_utilization, placed.draft.gpu_memory_utilization) == (0.7, 0.2)
    assert "each 2 of the 4 GPUs have a replica of their own: on a GPU 73." in found.reason
    ports = iter(range(9001, 9010))
    made = plan_stack(placed, explicit=(), free_port=lambda: next(ports), replica_devices=found.replica_devices)
    targets = [load(TargetSettings, spec.argv, {}) for spec in made.models[:2]]
    drafts = [load(DraftSettings, spec.argv, {}) for spec in made.models[2:]]
    assert [(each.device, each.tensor_parallel_size) for each in targets] == [("cuda:0", 2), ("cuda:2", 2)]
    assert [(each.device, each.tensor_parallel_size) for each in drafts] == [("cuda:0", 1), ("cuda:2", 1)]


def test_targets_share_a_draft_where_the_gpus_make_no_equal_parts(tmp_path: Path) -> None:
    five = cards(5, 141)
    found = arranged(tmp_path, five, "throughput", SEVENTY_B, {("coordinator", "max_running_requests"): 600})
    assert (found.replica_devices, found.shares_draft) == (("cuda:2",), True)
    assert "for throughput 2 targets, on 2 GPUs each, share a draft on the last GPU: 70.6 GB" in found.reason
    placed = place(found.settings, five).settings
    ports = iter(range(9001, 9010))
    made = plan_stack(
        placed, explicit=(), free_port=lambda: next(ports), replica_devices=found.replica_devices, shares_draft=True
    )
    assert [spec.name for spec in made.models] == ["target-1", "target-2", "draft"]
    targets = [load(TargetSettings, spec.argv, {}) for spec in made.models[:2]]
    draft = load(DraftSettings, made.models[2].argv, {})
    assert [(each.device, each.tensor_parallel_size) for each in targets] == [("cuda:0", 2), ("cuda:2", 2)]
    assert (draft.device, draft.gpu_memory_utilization) == ("cuda:4", None)
    assert draft.max_sessions_per_link == 2 * targets[0].max_sessions_per_link
    coordinator = load(CoordinatorSettings, made.coordinators[0].argv, {})
    assert coordinator.draft_address == made.models[2].address
    assert coordinator.target_address == ",".join(spec.address for spec in made.models[:2])


def test_three_gpus_have_two_targets_where_a_draft_has_no_room_beside_one(tmp_path: Path) -> None:
    found = arranged(tmp_path, cards(3, 28), "throughput", LARGE)  # 16.1 and 2.5 GB of .6 of 28
    assert (found.replica_devices, found.shares_draft) == (("cuda:1",), True)
    assert found.settings.draft.device == "cuda:2"


def test_replicas_of_one_gpu_need_no_heads_that_divide(tmp_path: Path) -> None:
    found = arranged(tmp_path, TWO, "throughput", LARGE, {}, num_key_value_heads=5)
    assert (found.settings.target.tensor_parallel_size, found.replica_devices) == (1, ("cuda:1",))


def test_a_target_without_room_for_replicas_is_on_all_gpus(tmp_path: Path) -> None:
    found = arranged(tmp_path, TWO, "throughput", SEVENTY_B)
    assert (found.settings.target.tensor_parallel_size, found.replica_devices) == (2, ())
    assert "GB of weights are more than 0.6 of a GPU's 141.0 GB" in found.reason


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
