"""EAGLE and MTP between a real target and a real session loop: drafts are those of the papers, output the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import DraftSettings, load
from outrider.config.fields import DraftMethod
from outrider.errors import ModelError
from outrider.ports import HiddenStateChunk
from tests.draft_service.head_rig import LENGTH, REQUESTS, Checked, check_states, options, p_of_joint, plain, served
from tests.support.pair_heads import EagleReference, MtpReference, PairReference, build_eagle, build_mimo
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model

HEADS = ["eagle", "mtp"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Head and target of each method."""
    folder = tmp_path_factory.mktemp("heads")
    mimo = build_mimo(folder / "mimo")
    return {"eagle": (build_eagle(folder / "eagle"), cached_tiny_model("llama", seed=1)), "mtp": (mimo, mimo)}


def reference_of(method: str, head: Path, target: Path) -> PairReference:
    return EagleReference(head, target) if method == "eagle" else MtpReference(head, cached_tiny_model("qwen2", seed=1))


def checked(method: str, head: Path, target: Path, **more: Any) -> Checked:
    return Checked(served(method, head, target), reference_of(method, head, target), target, **more)


@pytest.mark.parametrize("method", HEADS)
def test_drafts_are_those_of_the_paper_and_output_the_targets(folders: Any, method: str) -> None:
    rig = checked(method, *folders[method])
    assert rig.generate(REQUESTS) == plain(folders[method][1], REQUESTS)


@pytest.mark.parametrize(
    "layout",
    [
        {"bias": True, "own_embedding": True},
        {"speculators": True, "bias": True},
        {"speculators": True},
        {"qkv_bias": True},
        {"reverse": True},
    ],
    ids=["bias-and-embedding", "speculators-bias", "speculators", "qkv-bias", "reversed"],
)
def test_eagle_in_every_layout(tmp_path: Path, layout: Any) -> None:
    target = cached_tiny_model("llama", seed=1)
    rig = checked("eagle", build_eagle(tmp_path, **layout), target)
    assert rig.generate(REQUESTS[:3]) == plain(target, REQUESTS[:3])


def test_tied_embeddings_are_the_head_too(tmp_path: Path) -> None:
    target = cached_tiny_model("llama", seed=2, tie_word_embeddings=True)
    rig = checked("eagle", build_eagle(tmp_path), target)
    assert rig.generate(REQUESTS[:3]) == plain(target, REQUESTS[:3])


@pytest.mark.parametrize("method", HEADS)
def test_states_are_those_of_the_paper(folders: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, target = folders[method]
    check_states(served(method, head, target), reference_of(method, head, target), target, monkeypatch)


@pytest.mark.parametrize("method", HEADS)
def test_prompts_in_chunks(folders: Any, method: str) -> None:
    rig = checked(method, *folders[method], target_forward=16, draft_forward=7)
    chunks: list[Any] = []
    rig.rig.watch_target = lambda run, asked, answer: chunks.append(isinstance(answer, HiddenStateChunk))
    assert rig.generate(REQUESTS) == plain(folders[method][1], REQUESTS)
    assert sum(chunks) > 4


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("every", [2, 3])
def test_rebuilt_sessions(folders: Any, method: str, every: int) -> None:
    rig = checked(method, *folders[method], lose_every=every)
    assert rig.generate(REQUESTS) == plain(folders[method][1], REQUESTS)


@pytest.mark.parametrize("method", HEADS)
def test_cached_prefixes(folders: Any, method: str) -> None:
    rig = checked(method, *folders[method])
    requests = [options(7, 40), options(7, 41)]
    outputs = [rig.rig.generate([request])[0] for request in requests]
    cache = rig.draft.prefix_cache
    assert cache is not None
    assert cache.num_hit_tokens >= 36
    assert outputs == plain(folders[method][1], requests)


@pytest.mark.parametrize("method", HEADS)
def test_coupled_output_is_the_targets_own(folders: Any, method: str) -> None:
    head, target = folders[method]
    more = {"temperature": 1.0, "acceptance_method": "coupled"}
    requests = [{**request, **more, "seed": seed} for seed, request in enumerate(REQUESTS)]
    rig = ServiceRig(target, served(method, head, target), max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(requests) == plain(target, requests)
    assert rig.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("method", "sample", "judged"),
    [
        ("eagle", "probabilistic", "standard"),
        pytest.param("eagle", "probabilistic", "block", marks=pytest.mark.integration),
        ("mtp", "greedy", "standard"),
    ],
)
def test_rejection_keeps_the_targets_distribution(folders: Any, method: str, sample: str, judged: str) -> None:
    head, target = folders[method]
    body = cached_tiny_model("qwen2", seed=1) if method == "mtp" else None
    draft = served(method, head, target, "--draft-sample-method", sample)
    assert p_of_joint(draft, target, body, rejection_sample_method=judged) > 1e-4


# Loading

EAGLE_REFUSED = [
    ({"architectures": ["BertModel"]}, "BertModel is no EAGLE head; such are LlamaForCausalLM"),
    ({"hidden_size": 64}, "hidden_size is 64, and an EAGLE head for .* has the target's, 32"),
    ({"vocab_size": 300}, "vocab_size is 300, and the target's is 272"),
    ({"layernorms": True}, "heads without norms of their own are supported"),
    ({"intermediate_size": 40}, r"config.json asks for \[40, 32\]"),
    ({"num_hidden_layers": 2}, "heads of one layer are supported"),
]


@pytest.mark.parametrize(("changes", "said"), EAGLE_REFUSED)
def test_a_wrong_eagle_head_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        served("eagle", build_eagle(tmp_path, **changes), cached_tiny_model("llama", seed=1))
    assert "\n" not in str(caught.value)


def test_an_eagle3_head_is_no_eagle_head(tmp_path: Path) -> None:
    head = build_eagle(tmp_path)
    tensors = load_file(head / "model.safetensors")
    tensors["layers.0.hidden_norm.weight"] = torch.ones(32)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor hidden_norm.weight is not part of an EAGLE head"):
        served("eagle", head, cached_tiny_model("llama", seed=1))


def test_a_target_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    target = cached_tiny_model("qwen2", seed=1)
    with pytest.raises(ModelError, match="a Qwen2ForCausalLM has no MTP layer; such layers are in checkpoints of MiMo"):
        served("mtp", target, target)
    mimo = build_mimo(tmp_path / "m")
    tensors = load_file(mimo / "model.safetensors")
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, mimo / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor input_proj.weight is missing; an MTP layer has"):
        served("mtp", mimo, mimo)


def test_further_mtp_layers_are_left_alone(tmp_path: Path) -> None:
    mimo = build_mimo(tmp_path / "m", num_layers=2)
    rig = checked("mtp", mimo, mimo)
    assert rig.generate(REQUESTS[:3]) == plain(mimo, REQUESTS[:3])


def test_the_model_of_an_mtp_layer_is_the_target() -> None:
    for method in ("mtp", "mimo_mtp"):
        settings = load(DraftSettings, ["--method", method, "--model", "/models/mimo"], {})
        assert (settings.method, settings.model, settings.target_model) == (DraftMethod.MTP, None, "/models/mimo")
    assert load(DraftSettings, ["--method", "mtp"], {}).target_model is None


def test_published_names_of_eagle(tmp_path: Path) -> None:
    """SafeAILab's ``Model`` saves these, its embedding aside (``eagle/model/cnets1.py``)."""
    layer = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names = {f"layers.0.self_attn.{name}.weight" for name in layer}
    names |= {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    names |= {"fc.weight", "layers.0.post_attention_layernorm.weight"}
    assert set(load_file(build_eagle(tmp_path) / "model.safetensors")) == names
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
