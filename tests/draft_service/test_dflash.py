"""DFlash between a real target and a real session loop: blocks are those of the paper, output the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.types import LAST_HIDDEN_STATE
from outrider_draft.proposers.dflash import BlockExecutor
from tests.draft_service.head_rig import LENGTH, REQUESTS, Checked, options, p_of_joint, plain, served
from tests.support.dflash import CONFIG, DFlashReference, build_dflash
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model


@pytest.fixture(scope="module")
def target() -> Path:
    return cached_tiny_model("llama", seed=1)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dflash(tmp_path_factory.mktemp("dflash"))


def checked(drafter: Path, target: Path, num_pages: int = 800, **more: Any) -> Checked:
    draft = served("dflash", drafter, target, "--num-pages", str(num_pages))
    return Checked(draft, DFlashReference(drafter, target), target, **more)


def test_blocks_are_those_of_the_paper_and_output_the_targets(drafter: Path, target: Path) -> None:
    assert checked(drafter, target).generate(REQUESTS) == plain(target, REQUESTS)


SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "reversed": {"reverse": True},
    "speculators": {"speculators": True},
    "reduced vocabulary": {"speculators": True, "draft_vocab_size": 96},
    "one window": SLIDING,
    "windows": {"dflash_config": {**CONFIG["dflash_config"], "use_swa": True, "swa_window_size": 7}},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_drafters(tmp_path: Path, target: Path, layout: dict[str, Any]) -> None:
    assert checked(build_dflash(tmp_path, **layout), target).generate(REQUESTS[:3]) == plain(target, REQUESTS[:3])


def test_states_are_those_of_the_paper(drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = served("dflash", drafter, target)
    assert isinstance(found.executor, BlockExecutor)
    head, seen = found.executor.block_runner.block_head, []
    logits = head.logits

    def watch(normed: torch.Tensor) -> torch.Tensor:
        seen.append(normed.clone())
        return logits(normed)

    monkeypatch.setattr(head, "logits", watch)
    rig = ServiceRig(target, found, max_model_len=LENGTH, num_speculative_tokens=4)
    bases: list[int] = []

    def note(event: Any) -> Any:
        if event.token_ids:
            bases.append(event.base_length)
        return event

    rig.change_draft_event = note
    request = options(5, 40)
    output = rig.generate([request])[0]
    text, reference = [*request["prompt_token_ids"], *output], DFlashReference(drafter, target)
    assert len(seen) > 3
    for states, base in zip(seen, bases, strict=True):
        torch.testing.assert_close(states, reference.block(text[:base], len(states)), atol=1e-4, rtol=1e-4)


def test_prompts_in_chunks(drafter: Path, target: Path) -> None:
    rig = checked(drafter, target, target_forward=16, draft_forward=7)
    assert rig.generate(REQUESTS) == plain(target, REQUESTS)


@pytest.mark.parametrize("every", [2, 3])
def test_rebuilt_sessions(drafter: Path, target: Path, every: int) -> None:
    assert checked(drafter, target, lose_every=every).generate(REQUESTS) == plain(target, REQUESTS)


def test_cached_prefixes(drafter: Path, target: Path) -> None:
    rig = checked(drafter, target)
    requests = [options(7, 40), options(7, 41)]
    outputs = [rig.rig.generate([request])[0] for request in requests]
    cache = rig.draft.prefix_cache
    assert cache is not None
    assert cache.num_hit_tokens >= 36
    assert outputs == plain(target, requests)


def test_a_block_has_no_more_tokens_than_it_was_trained_for(tmp_path: Path, target: Path) -> None:
    rig = ServiceRig(
        target, served("dflash", build_dflash(tmp_path, block_size=3), target), max_model_len=LENGTH,
        num_speculative_tokens=8,
    )  # fmt: skip
    lengths: list[int] = []

    def note(event: Any) -> Any:
        lengths.append(len(event.token_ids))
        return event

    rig.change_draft_event = note
    assert rig.generate(REQUESTS) == plain(target, REQUESTS)
    assert max(lengths) == 2


def test_with_few_pages_sessions_take_turns(drafter: Path, target: Path) -> None:
    """Blocks take pages beside the committed text; the youngest sessions give theirs back."""
    rig = checked(drafter, target, num_pages=24)
    requests = [options(seed, 30, max_tokens=16) for seed in range(6)]
    assert rig.generate(requests) == plain(target, requests)
    assert rig.draft.max_cached_tokens == 24 * 4


def test_coupled_output_is_the_targets_own(drafter: Path, target: Path) -> None:
    more = {"temperature": 1.0, "acceptance_method": "coupled", "repetition_penalty": 1.2}
    requests = [{**request, **more, "seed": seed} for seed, request in enumerate(REQUESTS)]
    rig = ServiceRig(target, served("dflash", drafter, target), max_model_len=LENGTH, num_speculative_tokens=3)
    assert rig.generate(requests) == plain(target, requests)
    assert rig.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("sample", "judged"),
    [
        ("probabilistic", "standard"),
        pytest.param("greedy", "standard", marks=pytest.mark.integration),
        pytest.param("probabilistic", "block", marks=pytest.mark.integration),
    ],
)
def test_rejection_keeps_the_targets_distribution(drafter: Path, target: Path, sample: str, judged: str) -> None:
    draft = served("dflash", drafter, target, "--draft-sample-method", sample)
    assert p_of_joint(draft, target, rejection_sample_method=judged) > 1e-4


# Loading


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DFlashSpeculator"]}, "DFlashSpeculator is no DFlash drafter; such are DFlashDraftModel"),
        ({"dflash_config": None}, "dflash_config is missing"),
        ({"dflash_config": {"mask_token_id": 300}}, "mask_token_id an id below 272; they are 5 and 300"),
        ({"speculators": True, "speculators_model_type": "eagle3"}, "has speculators_model_type dflash"),
        ({"speculators": True, "sample_from_anchor": True}, "that drafts from its masks alone is supported"),
        (
            {"dflash_config": {**CONFIG["dflash_config"], "draft_vocab_size": 300}},
            "draft_vocab_size is 300, above the target's 272",
        ),
        ({**SLIDING, "sliding_window": 3}, "a block of 5 tokens does not fit a window of 3"),
        ({"speculators": True, "aux_hidden_state_layer_ids": [1, 3]}, "should be layers from 0 to 1"),
        ({"block_size": 1}, "block_size should be above 1"),
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers is 100000000, and .* beside it have 25 tensors in all"),
        ({**LAYOUTS["windows"], "num_hidden_layers": 1_000}, "num_hidden_layers is 1000, and .* have 25 tensors"),
        ({"hidden_size": 64}, "hidden_size is 64, and a DFlash drafter for .* has the target's, 32"),
        ({"vocab_size": 300}, "vocab_size is 300, and the target's is 272"),
        ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 2]}}, "should be layers from 0 to 1"),
        ({"dflash_config": {"mask_token_id": 260, "use_swa": True}}, "swa_window_size should be a number above 0"),
        ({"dflash_config": {"mask_token_id": 260, "causal": True}}, "blocks attend in both directions"),
        ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [0]}}, r"config.json asks for \[32, 32\]"),
    ],
)
def test_a_wrong_drafter_is_refused_in_one_sentence(
    tmp_path: Path, target: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        served("dflash", build_dflash(tmp_path, **changes), target)
    assert "\n" not in str(caught.value)


def test_a_draft_vocabulary_of_another_target_is_refused(tmp_path: Path, target: Path) -> None:
    drafter = build_dflash(tmp_path, speculators=True, draft_vocab_size=96)
    tensors = load_file(drafter / "model.safetensors")
    tensors["d2t"][95] = 300
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(ModelError, match="d2t leads row 95 to id 395; ids of the target are from 0 to 271"):
        served("dflash", drafter, target)


def test_a_missing_tensor_is_named(tmp_path: Path, target: Path) -> None:
    drafter = build_dflash(tmp_path)
    tensors = load_file(drafter / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor layers.1.self_attn.k_norm.weight is missing; a DFlash drafter has"):
        served("dflash", drafter, target)


def test_layers_are_z_labs(tmp_path: Path) -> None:
    """Numbered from 0 and meant after the layer, the last one normalised; unnamed ones are spread evenly."""
    found = served("dflash", build_dflash(tmp_path), cached_tiny_model("llama", seed=1))
    assert found.description.hidden_state_layers == (1, LAST_HIDDEN_STATE)
    deep = cached_tiny_model("llama", seed=1, num_hidden_layers=8)
    unnamed = build_dflash(tmp_path / "u", dflash_config={"mask_token_id": 260})
    assert served("dflash", unnamed, deep).description.hidden_state_layers == (2, 6)
