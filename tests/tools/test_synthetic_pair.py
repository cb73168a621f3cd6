"""A tiny synthetic pair through transformers: what it says after every token, in float32 and in bfloat16."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from make_pair import app
from safetensors import safe_open
from synthetic_pair.command import make_pair
from synthetic_pair.shapes import SHAPES, find_shape
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from outrider.errors import ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.loader.model import LoadFormat
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.synthetic.cycle import PairMap

ACCEPTANCE, FORESEEN, NUM_DRAFT_TOKENS = 0.75, 0.8, 4


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PairMap]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = SHAPES[f"tiny-{request.param}"], SHAPES[f"tiny-{request.param}-draft"]
    pair = make_pair(folder, target, draft, acceptance=ACCEPTANCE, foreseen=FORESEEN, seed=5, shard_bytes=500_000)
    return folder, pair


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def models(request: pytest.FixtureRequest, made: tuple[Path, PairMap]) -> dict[str, PreTrainedModel]:
    return {
        role: AutoModelForCausalLM.from_pretrained(made[0] / role, dtype=request.param) for role in ("target", "draft")
    }


def walks(pair: PairMap, num_walks: int, length: int) -> torch.Tensor:
    """[num_walks, length] tokens in the order of the cycle, from places spread over it."""
    starts = np.linspace(0, len(pair.order), num_walks, endpoint=False).astype(np.int64)
    return torch.from_numpy(pair.order[(starts[:, None] + np.arange(length)) % len(pair.order)])


@torch.inference_mode()
def logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = model(token_ids).logits
    return scores


def test_both_say_what_the_map_says_after_each_of_ten_thousand_tokens(
    made: tuple[Path, PairMap], models: dict[str, PreTrainedModel]
) -> None:
    _, pair = made
    tokens = walks(pair, 40, 256)
    said = {role: logits(model, tokens).argmax(-1).numpy() for role, model in models.items()}
    assert np.array_equal(said["target"], pair.target_next[tokens])
    assert np.array_equal(said["draft"], pair.draft_next[tokens])
    assert (said["draft"] == said["target"]).mean() == pytest.approx(ACCEPTANCE, abs=0.01)


def test_the_margin_is_far_above_rounding(made: tuple[Path, PairMap], models: dict[str, PreTrainedModel]) -> None:
    for model in models.values():
        best = logits(model, walks(made[1], 8, 128)).float().topk(2).values
        assert (best[..., 0] - best[..., 1]).min() > 1.0


def test_foreseen_tokens_are_the_drafts_second_choice(
    made: tuple[Path, PairMap], models: dict[str, PreTrainedModel]
) -> None:
    _, pair = made
    tokens = walks(pair, 8, 128)
    second = logits(models["draft"], tokens).topk(2).indices[..., 1].numpy()
    is_true = second == pair.target_next[tokens]
    foreseen, wrong = pair.foreseen[tokens.numpy()], ~pair.agrees[tokens.numpy()]
    assert is_true[foreseen].all()
    assert is_true[wrong].mean() == pytest.approx(FORESEEN, abs=0.02)


def test_proposals_of_several_tokens_are_accepted_as_often_as_asked(
    made: tuple[Path, PairMap], models: dict[str, PreTrainedModel]
) -> None:
    """A step from every token: the draft proposes from its own tokens, the target scores them at once."""
    _, pair = made
    prefix = walks(pair, len(pair.order), 3)
    proposed = prefix
    for _ in range(NUM_DRAFT_TOKENS):
        proposed = torch.cat([proposed, logits(models["draft"], proposed)[:, -1:].argmax(-1)], dim=1)
    scored = logits(models["target"], proposed)[:, prefix.shape[1] - 1 :].argmax(-1)  # [V, K+1]
    agrees = (scored[:, :-1] == proposed[:, prefix.shape[1] :]).long()
    accepted = agrees.cumprod(dim=1).sum(dim=1)
    judged = accepted.sum() + (accepted < NUM_DRAFT_TOKENS).sum()
    assert float(accepted.sum() / judged) == pytest.approx(ACCEPTANCE, abs=0.01)
    emitted = scored.gather(1, accepted[:, None])[:, 0].numpy()
    assert np.array_equal(emitted, pair.order[(np.arange(len(pair.order)) + 3 + accepted.numpy()) % len(pair.order)])


def test_generation_walks_the_cycle_and_never_ends(made: tuple[Path, PairMap]) -> None:
    folder, pair = made
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    prompt = torch.from_numpy(pair.order[None, -50:])
    output = model.generate(prompt, max_new_tokens=200, do_sample=False)
    assert output[0].tolist() == [*pair.order[-50:], *pair.order[:200]]


def test_our_engine_serves_it(made: tuple[Path, PairMap]) -> None:
    folder, pair = made
    for role, says in (("target", pair.target_next), ("draft", pair.draft_next)):
        runner = ModelRunner.load(folder / role, dtype=torch.float32, num_pages=32)
        tokens = pair.order[:200].tolist()
        said = runner.forward([ForwardRow(runner.sequences.open(200), tokens, 200)]).argmax(-1)
        assert said.tolist() == says[tokens].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_made_where_they_are_used_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    shapes = SHAPES[f"tiny-{family}"], SHAPES[f"tiny-{family}-draft"]
    pairs = [
        make_pair(tmp_path / name, *shapes, acceptance=0.8, foreseen=0.5, seed=9, with_weights=name == "files")
        for name in ("files", "none")
    ]
    assert not list((tmp_path / "none").rglob("*.safetensors"))
    for role in ("target", "draft"):
        runners = [
            ModelRunner.load(tmp_path / "files" / role, num_pages=8),
            ModelRunner.load(tmp_path / "none" / role, num_pages=8, load_format="synthetic"),
        ]
        tokens = pairs[1].order[:60].tolist()
        formats: list[tuple[str, LoadFormat]] = [("none", "synthetic"), ("files", "safetensors"), ("files", "dummy")]
        names = [
            describe_model(role, tmp_path / name / role, runners[1], load_format=load_format).model_name
            for name, load_format in formats
        ]
        assert names == [f"{role} (synthetic)", f"{role} (synthetic)", f"{role} (noise)"]
        logits_of = [runner.forward([ForwardRow(runner.sequences.open(60), tokens, 60)]) for runner in runners]
        assert torch.equal(*logits_of)


def test_a_folder_without_a_recipe_is_refused(made: tuple[Path, PairMap], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((made[0] / "target/config.json").read_bytes())
    with pytest.raises(ModelError, match=r"synthetic\.json"):
        ModelRunner.load(tmp_path, num_pages=8, load_format="synthetic")
    (tmp_path / "synthetic.json").write_text('{"role": "judge", "acceptance": 1, "foreseen": 0, "seed": 0}')
    with pytest.raises(ModelError, match="target or draft"):
        ModelRunner.load(tmp_path, num_pages=8, load_format="synthetic")


def test_every_matrix_is_dense_and_every_shard_within_its_size(made: tuple[Path, PairMap]) -> None:
    for folder in (made[0] / "target", made[0] / "draft"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 1
        assert sorted({*index["weight_map"].values()}) == [file.name for file in files]
        total = 0
        for file in files:
            assert file.stat().st_size < 500_000 + 10_000
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    tensor = handle.get_tensor(name)
                    assert index["weight_map"][name] == file.name
                    assert not (tensor == 0).any(), f"{name} has zeros"
                    total += tensor.nbytes
        assert total == index["metadata"]["total_size"]


def test_the_tokenizer_is_the_same_and_shows_every_id(made: tuple[Path, PairMap]) -> None:
    folder, _ = made
    assert (folder / "target/tokenizer.json").read_bytes() == (folder / "draft/tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    assert len(tokenizer) == SHAPES["tiny-llama"].vocab_size
    assert tokenizer.decode(tokenizer("naïve text\n").input_ids) == "naïve text\n"
    assert tokenizer.decode([1023, 300]) == " t1023 t300"


def test_a_pair_of_different_vocabularies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pair"):
        make_pair(tmp_path, SHAPES["llama-8b"], SHAPES["qwen3-0.6b"], acceptance=0.5)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("8B", 8.03), ("1B", 1.5), ("3B", 3.61), ("70B", 70.6), ("32B", 32.8), ("0.6B", 0.75), ("qwen3-8b", 8.19)],
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    """Real sizes, but for heads untied from embeddings (1B, 3B, 0.6B)."""
    assert find_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_command_makes_a_pair_and_says_what_it_is(tmp_path: Path) -> None:
    arguments = ["tiny", "tiny-draft", "--acceptance", "0.9", "--out", str(tmp_path / "pair"), "--dtype", "float32"]
    result = CliRunner().invoke(app, ["synthetic", *arguments])
    assert result.exit_code == 0, result.output
    description = json.loads((tmp_path / "pair" / "synthetic_pair.json").read_text())
    assert description["over_the_whole_cycle"]["acceptance"] == pytest.approx(0.9, abs=0.001)
    wrong = CliRunner().invoke(app, ["synthetic", "huge", "tiny", "--acceptance", "0.9", "--out", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "'huge' is no shape" in wrong.output
