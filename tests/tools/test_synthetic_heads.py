"""Synthetic heads draft the target's next token as often as they were asked to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synthetic_pair.command import make_head
from synthetic_pair.shapes import find_shape

from outrider.config import DraftSettings, load
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.support.service_rig import ServiceRig

# As many values a head as there are embeddings' own: their images are then as far apart.
SHAPE = replace(find_shape("tiny"), hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=128)
# A mask's image is in the heads of its distance, and a row of the last product has one for each distance.
WIDE = replace(SHAPE, hidden_size=512, num_heads=32, num_kv_heads=16)
CASES: dict[str, tuple[str, float, int | None]] = {
    "eagle3": ("eagle3", 0.7, 300),
    "eagle3, whole vocabulary": ("eagle3", 0.7, 1024),
    "dflash": ("dflash", 0.8, None),
    "dflash, reduced vocabulary": ("dflash", 0.6, 300),
    "mtp, always": ("mtp", 1.0, None),
    "mtp": ("mtp", 0.8, None),
}


@pytest.mark.integration
@pytest.mark.parametrize(("method", "acceptance", "draft_vocab_size"), CASES.values(), ids=CASES)
def test_acceptance_is_what_was_asked_for(
    tmp_path: Path, method: str, acceptance: float, draft_vocab_size: int | None
) -> None:
    check(tmp_path, method, acceptance, draft_vocab_size)


@pytest.mark.integration
@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_bfloat16_beside_a_target_made_where_it_is_used(tmp_path: Path, method: str) -> None:
    check(tmp_path, method, 0.7, None, dtype=torch.bfloat16, with_weights=False)


def test_blocks_are_as_long_as_the_heads_of_a_small_target_allow(tmp_path: Path) -> None:
    make_head(
        tmp_path, "dflash", find_shape("tiny"), acceptance=0.8, dtype=torch.float32, draft_vocab_size=None,
        with_weights=False,
    )  # fmt: skip
    config = json.loads((tmp_path / "draft" / "config.json").read_text(encoding="utf-8"))
    assert config["block_size"] == find_shape("tiny").num_heads + 1 == 5


def check(
    folder: Path, method: str, acceptance: float, draft_vocab_size: int | None, *,
    dtype: torch.dtype = torch.float32, with_weights: bool = True,
) -> None:  # fmt: skip
    """Make a head and let it draft for two texts."""
    shape = WIDE if method == "dflash" else SHAPE
    pair = make_head(
        folder, method, shape, acceptance=acceptance, dtype=dtype, draft_vocab_size=draft_vocab_size,
        with_weights=with_weights,
    )  # fmt: skip
    walked = pair.order[:draft_vocab_size]
    assert pair.agrees[walked].mean() == pytest.approx(acceptance, abs=0.005)
    own = [] if method == "mtp" else ["--model", str(folder / "draft")]
    argv = ["--method", method, *own, "--target-model", str(folder / "target")]
    sizes = ["--device", "cpu", "--page-size", "16", "--num-pages", "600", "--max-model-len", "512"]
    draft = load_proposer(load(DraftSettings, [*argv, *sizes], {}), LoadHooks())
    assert draft.description.model_name == ("target (synthetic)" if method == "mtp" else "draft (synthetic)")
    options = {} if with_weights else {"load_format": "synthetic"}
    rig = ServiceRig(folder / "target", draft, max_model_len=512, num_speculative_tokens=3, target_options=options)
    firsts = [int(pair.order[place]) for place in (7, 7 + len(walked) // 2)]
    requests = [
        {"prompt_token_ids": (1000, first), "max_tokens": 150, "ignore_eos": True, "temperature": 0.0}
        for first in firsts
    ]
    accepted, drafted, judged = 0, 0, 0
    for first, said in zip(firsts, rig.generate(requests), strict=True):
        text = [first]
        for _ in said:
            text.append(int(pair.target_next[text[-1]]))
        assert said == text[1:]
        assert set(said) <= set(walked.tolist())
        counts = walk(text, pair.agrees.tolist(), 3)
        accepted, drafted, judged = accepted + counts[0], drafted + counts[1], judged + counts[2]
    assert rig.num_draft_tokens == pytest.approx(drafted, abs=12)
    assert rig.num_accepted_tokens == pytest.approx(accepted, abs=6)
    # Within 0.02 of what the map says of these texts, which itself has what was asked for.
    assert rig.num_accepted_tokens / judged == pytest.approx(accepted / judged, abs=0.02)


def walk(text: list[int], agrees: list[bool], draft_length: int) -> tuple[int, int, int]:
    """Tokens accepted, drafted and judged where drafts are right just where the map says so: after the first that is
    wrong none is accepted.
    """
    place, length, accepted, drafted, judged = 0, len(text) - 1, 0, 0, 0
    while place < length:
        count = min(draft_length, length - place)
        kept = 0
        while kept < count and agrees[text[place + kept]]:
            kept += 1
        accepted, drafted, judged = accepted + kept, drafted + count, judged + min(kept + 1, count)
        place += kept + 1
    return accepted, drafted, judged


def test_an_mtp_layer_has_the_targets_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an MTP layer drafts with the target's head"):
        make_head(tmp_path, "mtp", SHAPE, acceptance=0.5, draft_vocab_size=300)
