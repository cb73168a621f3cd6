"""MTP layers of Qwen3.5 and Qwen3-Next between a hybrid target and a session loop: drafts are the reference's, output
is the target's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import DraftSettings, load
from outrider.config.fields import DraftMethod
from outrider.errors import ModelError
from outrider.model_executor.draft_heads.loading import find_tensors, load_head
from outrider.model_executor.draft_heads.mtp import MtpHead, read_mtp_config
from tests.draft_service.head_rig import LENGTH, REQUESTS, Checked, check_states, options, p_of_joint, plain, served
from tests.model_executor.test_published_names import read_published, write_checkpoint
from tests.support.fp8_models import FP8, Format, by_row, compressed, quantize_folder
from tests.support.hybrid_mtp import HybridMtpReference, build_hybrid_mtp
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model

FAMILIES = ["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_next"]
SECOND_TIER = pytest.mark.integration


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return {family: build_hybrid_mtp(root / family, family) for family in FAMILIES}


def checked(target: Path, **more: Any) -> Checked:
    return Checked(served("mtp", target, target), HybridMtpReference(target), target, **more)


@pytest.mark.parametrize(
    "family",
    ["qwen3_5", "qwen3_next", *(pytest.param(name, marks=SECOND_TIER) for name in ("qwen3_5_text", "qwen3_5_moe"))],
)
def test_drafts_are_those_of_the_reference_and_output_the_targets(folders: dict[str, Path], family: str) -> None:
    target = folders[family]
    assert checked(target).generate(REQUESTS) == plain(target, REQUESTS)


@SECOND_TIER
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_states_are_those_of_the_reference(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folders[family]
    check_states(served("mtp", target, target), HybridMtpReference(target), target, monkeypatch)


@SECOND_TIER
def test_chunks_and_rebuilt_sessions(folders: dict[str, Path]) -> None:
    target = folders["qwen3_next"]
    rig = checked(target, target_forward=16, draft_forward=7, lose_every=3)
    assert rig.generate(REQUESTS) == plain(target, REQUESTS)


@SECOND_TIER
def test_coupled_output_is_the_targets_own(folders: dict[str, Path]) -> None:
    target = folders["qwen3_5"]
    more = {"temperature": 1.0, "acceptance_method": "coupled"}
    requests = [{**options(seed, 9), **more, "seed": seed} for seed in range(4)]
    rig = ServiceRig(target, served("mtp", target, target), max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(requests) == plain(target, requests)
    assert rig.num_draft_tokens > 0


@SECOND_TIER
def test_rejection_keeps_the_targets_distribution(folders: dict[str, Path]) -> None:
    target = folders["qwen3_5_text"]
    draft = served("mtp", target, target, "--draft-sample-method", "probabilistic")
    assert p_of_joint(draft, target) > 1e-4


@SECOND_TIER
def test_experts_are_read_one_by_one_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """Layout in which Qwen3-Next is published: a tensor for each projection of each expert."""
    target = build_hybrid_mtp(tmp_path / "target", "qwen3_next")
    path = target / "model.safetensors"
    tensors, prefix = load_file(path), "mtp.layers.0.mlp.experts."
    both, down = (tensors.pop(f"{prefix}{name}") for name in ("gate_up_proj", "down_proj"))
    for expert, weight in enumerate(both):
        gate, up = weight.chunk(2)
        tensors |= {
            f"{prefix}{expert}.gate_proj.weight": gate.clone(), f"{prefix}{expert}.up_proj.weight": up.clone(),
            f"{prefix}{expert}.down_proj.weight": down[expert].clone(),
        }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    reference = HybridMtpReference(folders["qwen3_next"])
    rig = Checked(served("mtp", target, target), reference, target)
    assert rig.generate(REQUESTS[:3]) == plain(folders["qwen3_next"], REQUESTS[:3])


def test_experts_that_a_quantizer_passed_over_are_read_as_they_are(tmp_path: Path) -> None:
    """Stacked in memory they are no linear layers, and the checkpoint does not list them among what it ignores."""
    form = Format(compressed("channel", None, ["lm_head", "mtp.fc"]), by_row, kept=("lm_head", "mtp.fc", "experts"))
    target = quantize_folder(build_hybrid_mtp(tmp_path / "source", "qwen3_next"), tmp_path / "target", form)
    stored = {name: tensor.dtype for name, tensor in load_file(target / "model.safetensors").items()}
    assert stored["mtp.layers.0.mlp.experts.down_proj"] == torch.float32
    assert stored["mtp.layers.0.self_attn.q_proj.weight"] == FP8
    head = MtpHead(read_mtp_config(target), dtype=torch.float32, device=torch.device("cpu"))
    load_head(head, target, target)


@SECOND_TIER
def test_layers_in_fp8_are_read_as_the_checkpoint_names_them(folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights in FP8 but for the product that joins embedding and state, which the checkpoint ignores."""
    form = Format(compressed("channel", None, ["lm_head", "mtp.fc"]), by_row, kept=("lm_head", "mtp.fc"))
    target = quantize_folder(folders["qwen3_5_text"], tmp_path / "target", form)
    stored = load_file(target / "model.safetensors")
    wide = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    for name in [name for name, tensor in wide.items() if tensor.dtype == FP8]:
        wide[name] = wide[name].float() * stored[f"{name}_scale"]
    assert stored["mtp.layers.0.mlp.up_proj.weight"].dtype == FP8
    widened = shutil.copytree(folders["qwen3_5_text"], tmp_path / "widened")
    save_file(wide, widened / "model.safetensors", metadata={"format": "pt"})
    rig = Checked(served("mtp", target, target), HybridMtpReference(widened), target)
    assert rig.generate(REQUESTS) == plain(widened, REQUESTS)


def test_a_target_without_its_layer_is_refused() -> None:
    target = cached_tiny_model("qwen3_5", seed=1)
    with pytest.raises(ModelError, match=r"Qwen3_5ForConditionalGeneration without tensors mtp\.\* has no MTP layer"):
        served("mtp", target, target)


@pytest.mark.parametrize("lost", ["fc", "layers.0.mlp.shared_expert.up_proj"])
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str) -> None:
    target = build_hybrid_mtp(tmp_path / "target", "qwen3_next")
    tensors = load_file(target / "model.safetensors")
    del tensors[f"mtp.{lost}.weight"]
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {lost.removeprefix('layers.0.')}.weight is missing; an MTP layer"):
        served("mtp", target, target)


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_every_published_tensor_has_its_place(name: str, tmp_path: Path) -> None:
    published = write_checkpoint(tmp_path, read_published(name))
    head = MtpHead(read_mtp_config(tmp_path), dtype=torch.bfloat16, device=torch.device("meta"))
    used = {tensor.key for tensor, _ in find_tensors(head, tmp_path, tmp_path)}
    own = {key for key in published if key.startswith("mtp.")}
    assert used == own | {"model.language_model.embed_tokens.weight", "lm_head.weight"}


def test_vllms_names_of_the_method() -> None:
    for method in ("qwen3_next_mtp", "qwen3_5_mtp"):
        settings = load(DraftSettings, ["--method", method, "--model", "/models/qwen"], {})
        assert (settings.method, settings.model, settings.target_model) == (DraftMethod.MTP, None, "/models/qwen")
