"""A synthetic EAGLE-3 head drafts the target's next token as often as it was asked to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_synthetic_pair import make_eagle3
from synthetic_pair.shapes import find_shape

from outrider.config import DraftSettings, load
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.support.service_rig import ServiceRig


@pytest.mark.parametrize(("acceptance", "draft_vocab_size"), [(1.0, 300), (0.7, 300), (0.7, 1024)])
def test_acceptance_is_what_was_asked_for(tmp_path: Path, acceptance: float, draft_vocab_size: int) -> None:
    torch.set_num_threads(1)
    # As many values a head as there are embeddings' own: their images are then as far apart.
    shape = replace(find_shape("tiny"), hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=128)
    pair = make_eagle3(tmp_path, shape, acceptance=acceptance, dtype=torch.float32, draft_vocab_size=draft_vocab_size)
    argv = ["--method", "eagle3", "--model", str(tmp_path / "draft"), "--target-model", str(tmp_path / "target")]
    sizes = ["--device", "cpu", "--page-size", "16", "--num-pages", "200", "--max-model-len", "256"]
    draft = load_proposer(load(DraftSettings, [*argv, *sizes], {}), LoadHooks())
    rig = ServiceRig(tmp_path / "target", draft, max_model_len=256, num_speculative_tokens=3)
    first = int(pair.order[7])
    request = {"prompt_token_ids": (1000, first), "max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    (said,) = rig.generate([request])
    expected = [first]
    for _ in said:
        expected.append(int(pair.target_next[expected[-1]]))
    assert said == expected[1:]
    assert set(said) <= set(pair.order[:draft_vocab_size].tolist())
    # Drafts are right just where the map says so: after the first that is wrong none is accepted.
    agrees, length, accepted, drafted = pair.agrees.tolist(), len(said), 0, 0
    text, place = [first, *said], 0
    while place < length:
        count = min(3, length - place)
        kept = 0
        while kept < count and agrees[text[place + kept]]:
            kept += 1
        accepted, drafted = accepted + kept, drafted + count
        place += kept + 1
    assert rig.num_accepted_tokens == pytest.approx(accepted, abs=6)
    assert rig.num_draft_tokens == pytest.approx(drafted, abs=12)
