"""The shipped heads: each drafts for the target that it was trained for, which says what it says alone."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.cli.demo import DRAFTS
from outrider.config import DraftSettings, load
from outrider.demo import DFLASH, EAGLE3, PROMPTS, TARGET
from outrider_draft.proposers.registry import LoadHooks, load_proposer
from tests.support.service_rig import ServiceRig


def test_the_demonstration_knows_them() -> None:
    assert (DRAFTS["eagle3"], DRAFTS["dflash"]) == (EAGLE3, DFLASH)
    assert all((folder / "config.json").is_file() for folder in DRAFTS.values())


@pytest.mark.parametrize(
    ("method", "temperature", "least"),
    [("eagle3", 0.0, 0.5), ("eagle3", 1.0, 0.35), ("dflash", 0.0, 0.4), ("dflash", 1.0, 0.25)],
)
def test_drafts_are_often_right(method: str, temperature: float, least: float) -> None:
    argv = ["--method", method, "--model", str(DRAFTS[method]), "--target-model", str(TARGET), "--dtype", "float32"]
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
    assert rig.num_accepted_tokens > least * rig.num_draft_tokens
