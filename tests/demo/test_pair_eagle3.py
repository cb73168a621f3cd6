"""The shipped EAGLE-3 head: it drafts for the target that it was trained for, which says what it says alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.cli.demo import DRAFTS
from outrider.config import DraftSettings, load
from outrider.demo import EAGLE3, TARGET
from outrider.demo.prompts import PROMPTS
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.support.service_rig import ServiceRig


def test_the_demonstration_knows_it() -> None:
    assert DRAFTS["eagle3"] == EAGLE3
    assert all((folder / "config.json").is_file() for folder in DRAFTS.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_drafts_are_mostly_right(temperature: float) -> None:
    torch.set_num_threads(1)
    argv = ["--method", "eagle3", "--model", str(EAGLE3), "--target-model", str(TARGET), "--dtype", "float32"]
    sizes = ["--device", "cpu", "--num-pages", "200", "--max-model-len", "256"]
    draft = load_proposer(load(DraftSettings, [*argv, *sizes], {}), LoadHooks())
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    requests: list[dict[str, Any]] = [
        {
            "prompt_token_ids": tuple(tokenizer.encode(prompt).ids), "max_tokens": 40, "ignore_eos": True,
            "temperature": temperature, "seed": 1, "acceptance_method": "coupled",
        }
        for prompt in PROMPTS
    ]  # fmt: skip
    options = {"dtype": "float32", "device": "cpu"}
    rig = ServiceRig(TARGET, draft, max_model_len=256, num_speculative_tokens=3, target_options=options)
    said = rig.generate(requests)
    assert said == ServiceRig(TARGET, None, max_model_len=256, target_options=options).generate(requests)
    assert rig.num_accepted_tokens > (0.5 if temperature == 0 else 0.35) * rig.num_draft_tokens
