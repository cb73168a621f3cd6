"""Medusa and the MLP speculator: drafts are those of a plain reading of the papers; wrong checkpoints are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.config import DraftSettings, load
from outrider.errors import ConfigError, ModelError
from outrider.ports import Open
from outrider.types import HiddenStates, JudgingRule, SamplingParams
from outrider_draft.proposers.base import ProposalRequest
from outrider_draft.proposers.medusa import MedusaProposer
from outrider_draft.proposers.mlp_speculator import MlpSpeculatorProposer
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.draft_service.head_rig import ALLOWED, LENGTH, REQUESTS, Checked, p_of_joint, plain
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model, load_reference

HIDDEN, VOCABULARY = 32, 272
OPEN = Open(1, 1, SamplingParams(), 3, JudgingRule.GREEDY, prompt_length=4, max_length=100, num_token_ids=VOCABULARY)
MEDUSA = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_heads": 4, "num_hidden_layers": 2}
SPECULATOR = {"emb_dim": HIDDEN, "inner_dim": 24, "vocab_size": VOCABULARY, "n_predict": 3}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings(method: str, folder: Path) -> DraftSettings:
    return load(DraftSettings, ["--method", method, "--model", str(folder), "--device", "cpu"], {})


def request(states: torch.Tensor, token_ids: list[int], num_tokens: int) -> ProposalRequest:
    """Request with the states [N, H] of the last positions but the newest token's."""
    start = len(token_ids) - 1 - states.shape[0]
    brought = HiddenStates(start, states.shape[0], HIDDEN, "float32", states.numpy().tobytes())
    return ProposalRequest(OPEN, token_ids, num_tokens, brought)


class ReferenceMedusaHead(nn.Module):
    """``medusa/model/medusa_model.py`` of FasterDecoding: residual blocks, then a linear head."""

    def __init__(self, *, bias: bool, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(MEDUSA["num_hidden_layers"]))
        self.head = nn.Linear(HIDDEN, rows, bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state = state + nn.SiLU()(layer(state))
        logits: torch.Tensor = self.head(state)
        return logits


def medusa(folder: Path, *, bias: bool = False, rows: int = VOCABULARY, prefix: str = "") -> list[ReferenceMedusaHead]:
    torch.manual_seed(rows)
    heads = [ReferenceMedusaHead(bias=bias, rows=rows) for _ in range(MEDUSA["num_heads"])]
    tensors = {}
    for index, head in enumerate(heads):
        for name, tensor in head.layers.state_dict().items():
            tensors[f"{prefix}blocks.{index}.layers.{name}"] = tensor
        tensors[f"{prefix}lm_heads.{index}.weight"] = head.head.weight.data
    config: dict[str, Any] = {**MEDUSA, "medusa_fc_bias": bias, "truncated_vocab_size": None}
    if rows < VOCABULARY:
        tensors["token_map"] = torch.randperm(VOCABULARY)[:rows]
        config["truncated_vocab_size"] = rows
    written(folder, config, tensors)
    return heads


@pytest.mark.parametrize(
    ("bias", "rows", "prefix"), [(False, VOCABULARY, ""), (True, VOCABULARY, "medusa_heads."), (False, 50, "")]
)
@torch.no_grad()
def test_medusas_drafts_are_each_heads_likeliest(tmp_path: Path, bias: bool, rows: int, prefix: str) -> None:
    heads = medusa(tmp_path / "m", bias=bias, rows=rows, prefix=prefix)
    proposer = MedusaProposer.load(settings("medusa", tmp_path / "m"))
    token_map = load_file(tmp_path / "m" / "model.safetensors").get("token_map", torch.arange(VOCABULARY))
    states = torch.randn(5, HIDDEN)
    asked = [request(states[i : i + 1 + i % 2], [1, 2, 3, 4 + i], 1 + i) for i in range(4)]
    for i, found in enumerate(proposer.propose(asked)):
        last = states[i + i % 2]
        assert found.token_ids == [int(token_map[head(last).argmax()]) for head in heads[: 1 + i]]


@torch.no_grad()
def test_the_authors_own_checkpoints_are_read_too(tmp_path: Path) -> None:
    heads = medusa(tmp_path / "m", bias=True)
    tensors = {}
    for index, head in enumerate(heads):
        for name, tensor in head.layers.state_dict().items():
            layer, kind = name.split(".")
            tensors[f"{index}.{layer}.linear.{kind}"] = tensor
        tensors[f"{index}.2.weight"] = head.head.weight.data
    folder = tmp_path / "authors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 2}))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    proposer = MedusaProposer.load(settings("medusa", folder))
    state = torch.randn(1, HIDDEN)
    (found,) = proposer.propose([request(state, [1, 2, 3], 4)])
    assert found.token_ids == [int(head(state[0]).argmax()) for head in heads]
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 2}))
    with pytest.raises(ModelError, match=r"blocks.4.layers.0.bias \[32\] is missing"):
        MedusaProposer.load(settings("medusa", folder))


class ReferenceSpeculator:
    """The paper's recurrence, stage by stage, one row at a time."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, is_tied: bool, scales: bool) -> None:
        self.tensors, self.is_tied, self.scales = tensors, is_tied, scales

    def of(self, part: str, stage: int) -> torch.Tensor:
        if self.is_tied:
            stage = min(stage, 1) if part == "proj" else 0
        return self.tensors[f"speculator.{part}.{stage}.weight"]

    def draft(self, state: torch.Tensor, token_id: int, count: int) -> list[int]:
        inner, drafted = 24, []
        state_weight = 0.5 ** (0.5 / 3)
        embedding_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
        if self.scales:
            state = state / (state.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
        for stage in range(count):
            mixed = self.of("proj", stage) @ state + embedding_weight / state_weight * self.of("emb", stage)[token_id]
            mixed = mixed / (mixed.pow(2).mean() + 1e-6).sqrt()
            bias = self.tensors[f"speculator.ln.{0 if self.is_tied else stage}.bias"]
            state = nn.GELU()(self.of("ln", stage) * mixed + bias)
            token_id = int((self.of("head", stage) @ state).argmax())
            drafted.append(token_id)
        return drafted


def speculator(folder: Path, *, is_tied: bool = False, scales: bool = False) -> ReferenceSpeculator:
    torch.manual_seed(7)
    tensors = {}
    for stage in range(3):
        if not is_tied or stage < 2:
            tensors[f"speculator.proj.{stage}.weight"] = torch.randn(24, HIDDEN if stage == 0 else 24)
        if not is_tied or stage == 0:
            tensors[f"speculator.emb.{stage}.weight"] = torch.randn(VOCABULARY, 24)
            tensors[f"speculator.head.{stage}.weight"] = torch.randn(VOCABULARY, 24)
            tensors[f"speculator.ln.{stage}.weight"] = torch.rand(24) + 0.5
            tensors[f"speculator.ln.{stage}.bias"] = torch.randn(24)
    written(folder, {**SPECULATOR, "tie_weights": is_tied, "scale_input": scales}, tensors)
    return ReferenceSpeculator(tensors, is_tied=is_tied, scales=scales)


@pytest.mark.parametrize(("is_tied", "scales"), [(False, False), (True, True), (True, False)])
def test_the_speculators_drafts_are_those_of_the_paper(tmp_path: Path, is_tied: bool, scales: bool) -> None:
    reference = speculator(tmp_path / "s", is_tied=is_tied, scales=scales)
    proposer = MlpSpeculatorProposer.load(settings("mlp_speculator", tmp_path / "s"))
    states = torch.randn(6, HIDDEN)
    asked = [request(states[i : i + 1], [9, 8, 7 + i], i % 4) for i in range(6)]
    for i, found in enumerate(proposer.propose(asked)):
        assert list(found.token_ids) == reference.draft(states[i], 7 + i, i % 4)


def test_without_the_state_before_the_newest_token_nothing_is_proposed(tmp_path: Path) -> None:
    medusa(tmp_path / "m")
    proposer = MedusaProposer.load(settings("medusa", tmp_path / "m"))
    stale = request(torch.randn(1, HIDDEN), [1, 2, 3], 2)
    stale.token_ids = [1, 2, 3, 4]
    fresh = request(torch.randn(1, HIDDEN), [1, 2, 3], 2)
    found = proposer.propose([stale, ProposalRequest(OPEN, [1], 2), fresh])
    assert [len(each.token_ids) for each in found] == [0, 0, 2]


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_greedy_output_is_the_targets_own(tmp_path: Path, method: str) -> None:
    (medusa if method == "medusa" else speculator)(tmp_path / "d")
    target = cached_tiny_model("llama", seed=1)
    served = load_proposer(settings(method, tmp_path / "d"), LoadHooks())
    options = [
        {
            "prompt_token_ids": tuple(range(3 + i, 9 + 2 * i)),
            "max_tokens": 10,
            "ignore_eos": True,
            "temperature": 0.0,
            "num_speculative_tokens": 3,
        }
        for i in range(3)
    ]
    rig = ServiceRig(target, served)
    drafted = rig.generate(options)
    assert rig.num_draft_tokens
    assert drafted == ServiceRig(target, None).generate(options)


def among_allowed(method: str, folder: Path, *, reverse: bool) -> None:
    """A random head over the few ids that are drawn; ``reverse`` turns its last product round."""
    sign = -1 if reverse else 1
    if method == "medusa":
        medusa(folder, rows=len(ALLOWED))
        tensors = load_file(folder / "model.safetensors")
        tensors["token_map"] = torch.tensor(ALLOWED)
        tensors |= {name: sign * tensor for name, tensor in tensors.items() if name.startswith("lm_heads")}
    else:
        speculator(folder)
        tensors = load_file(folder / "model.safetensors")
        for stage in range(3):
            name = f"speculator.head.{stage}.weight"
            rows = torch.zeros_like(tensors[name])
            rows[list(ALLOWED)] = sign * tensors[name][list(ALLOWED)]
            tensors[name] = rows
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("method", "reverse"), [("medusa", False), ("mlp_speculator", True)])
def test_rejection_keeps_the_targets_distribution(tmp_path: Path, method: str, reverse: bool) -> None:
    among_allowed(method, tmp_path / "d", reverse=reverse)
    draft = load_proposer(settings(method, tmp_path / "d"), LoadHooks())
    assert p_of_joint(draft, cached_tiny_model("llama", seed=1)) > 1e-4


class InTheLoop:
    """Drafts of heads after a text, from the state that transformers computes of it anew."""

    def __init__(self, method: str, folder: Path, target: Path) -> None:
        self.model: Any = load_reference(target)
        self.heads = medusa(folder) if method == "medusa" else None
        self.speculator = speculator(folder) if self.heads is None else None

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> list[int]:
        state = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        if self.speculator is not None:
            return self.speculator.draft(state, text[-1], count)
        return [int(head(state).argmax()) for head in (self.heads or [])[:count]]


@pytest.mark.parametrize(
    "way",
    [{}, {"lose_every": 2}, {"lose_every": 3}, {"target_forward": 16, "draft_forward": 7}],
    ids=["rolled back", "rebuilt", "rebuilt in other steps", "in chunks"],
)
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_in_the_loop_drafts_are_those_of_the_papers(tmp_path: Path, method: str, way: dict[str, int]) -> None:
    target = cached_tiny_model("llama", seed=1)
    reference = InTheLoop(method, tmp_path / "d", target)
    rig = Checked(load_proposer(settings(method, tmp_path / "d"), LoadHooks()), reference, target, **way)
    requests = [*REQUESTS, REQUESTS[3]]  # the last finds its prompt in the target's prefix cache
    assert rig.generate(requests) == plain(target, requests)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_coupled_output_is_the_targets_own(tmp_path: Path, method: str) -> None:
    among_allowed(method, tmp_path / "d", reverse=False)
    target = cached_tiny_model("llama", seed=1)
    more = {"temperature": 1.0, "acceptance_method": "coupled", "allowed_token_ids": list(ALLOWED)}
    requests = [{**request, **more, "seed": seed} for seed, request in enumerate(REQUESTS)]
    draft = load_proposer(settings(method, tmp_path / "d"), LoadHooks())
    rig = ServiceRig(target, draft, max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(requests) == plain(target, requests)
    assert 0 < rig.num_accepted_tokens < rig.num_draft_tokens


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("medusa", {"num_heads": 5}, r"blocks.4.layers.0.weight \[32, 32\] is missing; the folder has"),
        ("medusa", {"hidden_size": 16}, r"should be \[16, 16\], and is \[32, 32\]"),
        ("medusa", {"num_heads": None}, "num_heads as a positive number, not None"),
        ("mlp_speculator", {"n_predict": 4}, r"emb.3.weight \[272, 24\] is missing"),
        ("mlp_speculator", {"inner_dim": 12}, r"should be \[272, 12\], and is \[272, 24\]"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, method: str, change: dict[str, Any], said: str
) -> None:
    (medusa if method == "medusa" else speculator)(tmp_path / "d")
    config = tmp_path / "d" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ModelError, match=said):
        load_proposer(settings(method, tmp_path / "d"), LoadHooks())


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    """Change the tensors and the configuration of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    written(folder, {**json.loads((folder / "config.json").read_text()), **config}, tensors)


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("medusa", lambda w: w.pop("lm_heads.1.weight"), r"lm_heads.1.weight \[272, 32\] is missing"),
        (
            "medusa",
            lambda w: w.update({"lm_heads.1.weight": torch.ones(VOCABULARY, HIDDEN, dtype=torch.int64)}),
            "lm_heads.1.weight is of type int64; supported are float64, float32, float16, bfloat16",
        ),
        (
            "medusa",
            lambda w: w.update({"blocks.0.layers.1.weight": torch.ones(HIDDEN, HIDDEN, dtype=torch.bool)}),
            "blocks.0.layers.1.weight is of type bool; supported are",
        ),
        (
            "medusa",
            lambda w: w.update({"lm_heads.0.weight": torch.ones(VOCABULARY, HIDDEN).to(torch.float8_e4m3fn)}),
            "lm_heads.0.weight is of type float8_e4m3fn; supported are",
        ),
        (
            "medusa",
            lambda w: w.update({"blocks.0.layers.0.bias": torch.ones(HIDDEN)}),
            "blocks.0.layers.0.bias is there, and config.json has no medusa_fc_bias: true",
        ),
        (
            "medusa",
            lambda w: w.update({"blocks.3.layers.2.weight": torch.ones(HIDDEN, HIDDEN)}),
            "blocks.3.layers.2.weight is not part of such heads as config.json has them",
        ),
        ("medusa", lambda w: w.update(more=torch.zeros(1)), "more is not part of such heads"),
        (
            "mlp_speculator",
            lambda w: w.update({"speculator.ln.2.bias": torch.ones(24, dtype=torch.int64)}),
            "ln.2.bias is of type int64; supported are float64",
        ),
        (
            "mlp_speculator",
            lambda w: w.update({"speculator.emb.0.weight": torch.ones(VOCABULARY, 24, dtype=torch.bool)}),
            "emb.0.weight is of type bool; supported are float64",
        ),
        ("mlp_speculator", lambda w: w.update({"speculator.ln.3.bias": torch.ones(24)}), "ln.3.bias is not part of"),
    ],
)
def test_wrong_tensors_are_refused_with_their_folder(tmp_path: Path, method: str, change: Any, said: str) -> None:
    (medusa if method == "medusa" else speculator)(tmp_path / "d")
    changed(tmp_path / "d", change)
    with pytest.raises(ModelError, match=f"^{tmp_path / 'd'}: {method}: tensor {said}"):
        load_proposer(settings(method, tmp_path / "d"), LoadHooks())


@pytest.mark.parametrize(
    ("token_map", "said"),
    [
        (torch.arange(50) + 0.5, "token_map holds floats; supported are int64, int32"),
        (torch.ones(50, dtype=torch.bool), "token_map is of type bool; supported are int64, int32"),
    ],
)
def test_a_token_map_is_of_whole_numbers(tmp_path: Path, token_map: torch.Tensor, said: str) -> None:
    medusa(tmp_path / "d", rows=50)
    changed(tmp_path / "d", lambda tensors: tensors.update(token_map=token_map))
    with pytest.raises(ModelError, match=said):
        load_proposer(settings("medusa", tmp_path / "d"), LoadHooks())


def test_tensors_that_need_not_be_there_are_passed_over(tmp_path: Path) -> None:
    """Heads beyond the configured, copies of what is shared, the ids of a whole vocabulary."""
    medusa(tmp_path / "m")
    changed(tmp_path / "m", lambda tensors: tensors.update(token_map=torch.arange(VOCABULARY)), num_heads=2)
    assert MedusaProposer.load(settings("medusa", tmp_path / "m")).max_draft_length == 2
    changed(tmp_path / "m", lambda tensors: None, original_lm_head=True, num_heads=4)
    assert MedusaProposer.load(settings("medusa", tmp_path / "m")).max_draft_length == 4
    speculator(tmp_path / "s")
    changed(tmp_path / "s", lambda tensors: None, tie_weights=True)
    assert MlpSpeculatorProposer.load(settings("mlp_speculator", tmp_path / "s")).max_draft_length == 3


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_heads_need_a_model(method: str) -> None:
    with pytest.raises(ConfigError, match=f"model: is needed by method {method}"):
        load(DraftSettings, ["--method", method], {})
