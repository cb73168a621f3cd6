"""EAGLE-3 between a real target and a real session loop: its drafts, token by token, are those of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import DraftSettings, load
from outrider.errors import ConfigError, ModelError
from outrider.ports import HiddenStateChunk
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, load_proposer
from outrider_draft.service import DraftService
from tests.draft_service.head_rig import LENGTH, REQUESTS, Checked, check_states, options, plain
from tests.draft_service.head_rig import served as served_as
from tests.model_executor.parity import random_ids
from tests.support.eagle3 import LAYERS, MATRICES, NORMS, Eagle3Reference, build_eagle3, fit_eagle3
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model

NORM_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target() -> Path:
    return cached_tiny_model("llama", seed=1)


def served(head: Path, target: Path, *more: str) -> ServedProposer:
    return served_as("eagle3", head, target, *more)


def checked_head(head: Path, target: Path, **more: Any) -> Checked:
    return Checked(served(head, target), Eagle3Reference(head, target), target, **more)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"speculators": True},
        {"speculators": True, "norm_before_residual": True},
        {"draft_vocab_size": 272},
        {"draft_vocab_size": 97},
        {"draft_vocab_size": 255, "speculators": True},
        {"reverse": True},
        {"speculators": True, "norms": ["norm_before_fc", "norm_output"], "norm_before_residual": True},
        {"norms": ["fc_norm", "norm_output"]},
    ],
    ids=[
        "safeailab",
        "speculators",
        "norm-before-residual",
        "whole-vocabulary",
        "odd",
        "odd-speculators",
        "reversed",
        "norm-before-fc",
        "fc-norm",
    ],
)
def test_drafts_are_those_of_the_paper_and_output_the_targets(tmp_path: Path, target: Path, layout: Any) -> None:
    checked = checked_head(build_eagle3(tmp_path, **layout), target)
    assert checked.generate(REQUESTS) == plain(target, REQUESTS)


@pytest.mark.parametrize(
    "layout", [{}, {"norm_before_residual": True}, {"draft_vocab_size": 97}, {"norms": NORM_FLAGS}]
)
def test_states_are_those_of_the_paper(
    tmp_path: Path, target: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = build_eagle3(tmp_path, **layout)
    check_states(served(head, target), Eagle3Reference(head, target), target, monkeypatch)


def test_a_trained_head_is_mostly_right(tmp_path: Path, target: Path) -> None:
    requests = [options(seed, 20, max_tokens=30) for seed in (1, 2, 3)]
    expected = plain(target, requests)
    head = build_eagle3(tmp_path, draft_vocab_size=272)
    texts = [[*one["prompt_token_ids"], *output] for one, output in zip(requests, expected, strict=True)]
    fit_eagle3(head, target, texts)
    checked = checked_head(head, target)
    assert checked.generate(requests) == expected
    assert checked.rig.num_accepted_tokens > 0.3 * checked.rig.num_draft_tokens


def test_prompts_in_chunks(tmp_path: Path, target: Path) -> None:
    checked = checked_head(build_eagle3(tmp_path), target, target_forward=16, draft_forward=7)
    chunks: list[Any] = []
    checked.rig.watch_target = lambda run, asked, answer: chunks.append(isinstance(answer, HiddenStateChunk))
    assert checked.generate(REQUESTS) == plain(target, REQUESTS)
    assert sum(chunks) > 4


@pytest.mark.parametrize("every", [2, 3])
def test_rebuilt_sessions(tmp_path: Path, target: Path, every: int) -> None:
    checked = checked_head(build_eagle3(tmp_path), target, lose_every=every)
    assert checked.generate(REQUESTS) == plain(target, REQUESTS)


def test_cached_prefixes(tmp_path: Path, target: Path) -> None:
    checked = checked_head(build_eagle3(tmp_path), target)
    requests = [options(7, 40), options(7, 41)]
    first, second = (checked.rig.generate([request]) for request in requests)
    cache = checked.draft.prefix_cache
    assert cache is not None
    assert cache.num_hit_tokens >= 36
    assert [*first, *second] == plain(target, requests)
    # The same tokens after another first one: none of their states are the same.
    hits = cache.num_hit_tokens
    ids = (requests[0]["prompt_token_ids"][0] ^ 1, *requests[0]["prompt_token_ids"][1:])
    other = {**requests[0], "prompt_token_ids": ids}
    assert checked.generate([other, *requests]) == plain(target, [other, *requests])
    assert cache.num_hit_tokens - hits <= 2 * 40


def test_coupled_output_is_the_targets_own(tmp_path: Path, target: Path) -> None:
    draft = served(build_eagle3(tmp_path), target)
    more = {"temperature": 1.0, "acceptance_method": "coupled"}
    requests = [{**request, **more, "seed": seed} for seed, request in enumerate(REQUESTS)]
    rig = ServiceRig(target, draft, max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(requests) == plain(target, requests)
    assert rig.num_draft_tokens > 0


@pytest.mark.integration
def test_rejection_keeps_the_targets_distribution(tmp_path: Path, target: Path) -> None:
    """Two tokens after a prompt, by chi-square over the target's likeliest pairs."""
    draft = served(build_eagle3(tmp_path), target)
    num_draws, prompt = 3000, tuple(token % 256 for token in random_ids(6, 9))
    requests = [
        {"prompt_token_ids": prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0.7, "top_k": 6, "seed": seed}
        for seed in range(num_draws)
    ]
    rig = ServiceRig(target, draft, max_model_len=LENGTH, num_speculative_tokens=2)
    found = rig.generate(requests)
    assert rig.num_accepted_tokens > 0
    model: Any = Eagle3Reference(tmp_path, target).target
    counts: dict[tuple[int, int], int] = {}
    for first, second, _ in found:
        counts[first, second] = counts.get((first, second), 0) + 1
    statistic, cells, rest = 0.0, 0, [0.0, 0.0]
    with torch.no_grad():
        for first, p in distribution(model, prompt):
            for second, q in distribution(model, (*prompt, first)):
                expected, seen = num_draws * p * q, counts.pop((first, second), 0)
                if expected < 8:
                    rest = [rest[0] + expected, rest[1] + seen]
                    continue
                statistic += (seen - expected) ** 2 / expected
                cells += 1
    assert not counts, "tokens outside of the target's support"
    if rest[0] > 8:
        statistic, cells = statistic + (rest[1] - rest[0]) ** 2 / rest[0], cells + 1
    # Wilson and Hilferty: a chi-square variable past this has a probability below 1e-5.
    bound = (cells - 1) * (1 - 2 / (9 * (cells - 1)) + 4.27 * (2 / (9 * (cells - 1))) ** 0.5) ** 3
    assert statistic < bound, (statistic, bound, cells)


def distribution(model: Any, text: tuple[int, ...]) -> list[tuple[int, float]]:
    """The six likeliest tokens at temperature 0.7, normalised."""
    logits = model(torch.tensor([list(text)])).logits[0, -1, :257] / 0.7
    top = logits.topk(6)
    return list(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))


# Loading


def test_fields_may_stand_in_eagle_config(tmp_path: Path, target: Path) -> None:
    head = build_eagle3(tmp_path, norms=["norm_before_fc"])
    config = json.loads((tmp_path / "config.json").read_text())
    names = ("eagle_aux_hidden_state_layer_ids", "norm_before_fc", "norm_before_residual")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "eagle_config": {key: config.pop(key) for key in names}})
    )
    reference = Eagle3Reference(head, target)
    reference.config = {**config, "norm_before_residual": False}
    checked = Checked(served(head, target), reference, target)
    assert checked.generate(REQUESTS) == plain(target, REQUESTS)


def test_a_whole_vocabulary_may_come_with_its_maps(tmp_path: Path, target: Path) -> None:
    head = build_eagle3(tmp_path, draft_vocab_size=272)
    tensors = load_file(head / "model.safetensors")
    maps = {"d2t": torch.zeros(272, dtype=torch.long), "t2d": torch.ones(272, dtype=torch.bool)}
    save_file({**tensors, **maps}, head / "model.safetensors")
    assert checked_head(head, target).generate(REQUESTS) == plain(target, REQUESTS)


def test_offsets_may_be_of_32_bits(tmp_path: Path, target: Path) -> None:
    head = build_eagle3(tmp_path)
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"].int()}, head / "model.safetensors")
    assert checked_head(head, target).generate(REQUESTS) == plain(target, REQUESTS)


PUBLISHED = """d2t t2d fc.weight lm_head.weight norm.weight midlayer.hidden_norm.weight midlayer.input_layernorm.weight
    midlayer.post_attention_layernorm.weight midlayer.self_attn.q_proj.weight midlayer.self_attn.k_proj.weight
    midlayer.self_attn.v_proj.weight midlayer.self_attn.o_proj.weight midlayer.mlp.gate_proj.weight
    midlayer.mlp.up_proj.weight midlayer.mlp.down_proj.weight"""
"""Keys that SafeAILab's ``Model`` saves but for the embedding (``eagle/model/cnets.py``)."""


def test_the_heads_of_these_tests_have_the_published_keys(tmp_path: Path) -> None:
    keys = set(PUBLISHED.split())
    assert set(load_file(build_eagle3(tmp_path / "one") / "model.safetensors")) == keys
    renamed = {key.replace("midlayer.", "layers.0.") for key in keys} | {"embed_tokens.weight"}
    assert set(load_file(build_eagle3(tmp_path / "two", speculators=True) / "model.safetensors")) == renamed
    assert len(NORMS) + len(MATRICES) + 5 == len(keys)


def test_published_layers_are_an_early_a_middle_and_a_late_one(tmp_path: Path) -> None:
    deep = cached_tiny_model("llama", seed=1, num_hidden_layers=8)
    head = build_eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    assert served(head, deep).description.hidden_state_layers == (2, 4, 5)
    assert served(build_eagle3(tmp_path), deep).description.hidden_state_layers == tuple(LAYERS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE-3 head"),
        (
            {"architectures": "LlamaForCausalLMEagle3"},
            r'architectures should be a list such as \["LlamaForCausalLMEagle3"\], not \'LlamaForCausalLMEagle3\'',
        ),
        ({"vocab_size": 300}, "vocab_size is 300, and the target's is 272"),
        ({"target_hidden_size": 64}, "reads states of 64 values"),
        ({"num_hidden_layers": 2}, "heads of one layer are supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; heads of one layer are supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "should be layers from 0 to 2"),
        ({"draft_vocab_size": 97}, "config.json asks for"),
        ({"intermediate_size": 40}, "config.json asks for"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size should be a number"),
        ({"norm_output": "yes"}, "norm_output should be true or false, not yes"),
        ({"norm_before_fc": True}, "tensor input_norm.weight is missing"),
        ({"transformer_layer_config": "llama"}, "transformer_layer_config should be an object, not llama"),
    ],
)
def test_a_wrong_head_is_refused_in_one_sentence(
    tmp_path: Path, target: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        config = tmp_path / "config.json"
        served(build_eagle3(tmp_path), target)
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}), encoding="utf-8")
        served(tmp_path, target)
    assert "\n" not in str(caught.value)


def twice(d2t: torch.Tensor) -> None:
    """Rows 3 and 7 lead to id 5, and no other does."""
    d2t[:] = torch.arange(96)
    d2t[3], d2t[7] = 5 - 3, 5 - 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("d2t"), "tensor d2t is missing"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "tensor more is not part"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"] + 200), r"d2t leads row \d+ to id \d+; ids of the target"),
        (lambda tensors: twice(tensors["d2t"]), "d2t leads rows 3 and 7 both to id 5; each should have its own"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].float()), "is of type F32"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, target: Path, change: Any, said: str) -> None:
    head = build_eagle3(tmp_path)
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        served(head, target)


def widen(head: Path, size: int = 48) -> None:
    """Make a head of another width than the target's, with no embedding of its own."""
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    shapes = {
        name: [size if length == 32 else 2 * size if length == 64 else length for length in tensor.shape]
        for name, tensor in tensors.items()
    }
    shapes |= {"fc.weight": [size, 3 * 32], "d2t": [96], "t2d": [272]}
    random = {name: torch.randn(*shape).to(tensors[name].dtype) for name, shape in shapes.items()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        random[f"midlayer.{name}.weight"] = torch.randn(tensors[f"midlayer.{name}.weight"].shape[0], 2 * size)
    random["midlayer.self_attn.o_proj.weight"] = torch.randn(size, 32)
    save_file({**random, "d2t": tensors["d2t"], "t2d": tensors["t2d"]}, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps({**config, "hidden_size": size, "target_hidden_size": 32}))


def test_a_wide_head_without_an_embedding_is_refused_by_the_key_that_it_lacks(tmp_path: Path, target: Path) -> None:
    head = build_eagle3(tmp_path)
    widen(head)
    with pytest.raises(ModelError) as caught:
        served(head, target)
    said = str(caught.value)
    assert said.startswith(f"{head}: tensor embed_tokens.weight [272, 48] is missing")
    assert "the target's model.embed_tokens.weight [272, 32] cannot take its place" in said
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "embed_tokens.weight": torch.randn(272, 48)}, head / "model.safetensors")
    rig = ServiceRig(target, served(head, target), max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(REQUESTS[:2]) == plain(target, REQUESTS[:2])
    assert rig.num_draft_tokens > 0


def test_a_pickle_is_not_read(tmp_path: Path, target: Path) -> None:
    head = build_eagle3(tmp_path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no other \*.safetensors; pytorch_model.bin is a pickle, which is not read"):
        served(head, target)


def test_settings_that_lack_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: is needed by method eagle3"):
        load(DraftSettings, ["--method", "eagle3"], {})
    head = build_eagle3(tmp_path)
    with pytest.raises(ConfigError, match="target_model"):
        DraftService.load(load(DraftSettings, ["--method", "eagle3", "--model", str(head)], {}))
    for method in ("eagle", "eagle3", "dflash", "mtp"):
        given = load(DraftSettings, ["--method", method, *(["--model", str(head)] if method != "mtp" else [])], {})
        with pytest.raises(ConfigError, match=f"draft.target_model: is needed by method {method}: the target's folder"):
            load_proposer(given, LoadHooks())
    assert json.loads((head / "config.json").read_text())["draft_vocab_size"] == 96
