"""The shipped pair: that it loads, fits its limits, belongs together, and is what its card says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
CARD = PAIR / "MODEL_CARD.md"
SOURCE = "import os\n\n\ndef read(path):\n    '''Lines: é, 日本, \\t.'''\n\treturn [x for x  in open(path)]  # x=10\n"


def load(name: str) -> tuple[Any, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32, output_loading_info=True)
    return loaded[0].eval(), loaded[1]


def card_sizes() -> dict[str, int]:
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+) \|$", CARD.read_text(), re.MULTILINE)
    return {name: int(size.replace(",", "")) for name, size in rows}


def file_sizes() -> dict[str, int]:
    files = [path for path in PAIR.rglob("*") if path.is_file() and path != CARD]
    return {path.relative_to(PAIR).as_posix(): path.stat().st_size for path in files}


def test_every_file_is_under_15_mb_and_all_are_under_40() -> None:
    sizes = [path.stat().st_size for path in PAIR.rglob("*") if path.is_file()]
    assert max(sizes) < 15_000_000
    assert sum(sizes) < 40_000_000


def test_the_card_lists_every_file_with_its_size() -> None:
    assert card_sizes() == file_sizes()
    total = re.search(r"^\| all \| ([\d,]+) \|$", CARD.read_text(), re.MULTILINE)
    assert total is not None
    assert int(total[1].replace(",", "")) == sum(file_sizes().values())


@pytest.mark.parametrize("name", ["target", "draft", "eagle3", "dflash"])
def test_weights_are_bfloat16_and_as_many_as_the_card_says(name: str) -> None:
    count = 0
    for path in (PAIR / name).glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - not a mapping
                part = weights.get_slice(key)
                assert part.get_dtype() == "BF16"
                count += torch.Size(part.get_shape()).numel()
    assert f"{name} {count:,}" in CARD.read_text()


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_loads_all_weights_and_the_shape_on_the_card(name: str) -> None:
    model, notes = load(name)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    config = model.config
    column = {"target": 1, "draft": 2}[name]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in CARD.read_text().splitlines() if "|" in line
    ]
    stated = {row[0]: row[column].replace(",", "") for row in rows if len(row) == 3}
    assert stated["layers"] == str(config.num_hidden_layers)
    assert stated["hidden size"] == str(config.hidden_size)
    assert stated["key-value heads"] == str(config.num_key_value_heads)
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize("name", ["target", "draft"])
def test_both_tokenizer_readers_agree_and_text_survives(name: str) -> None:
    fast = Tokenizer.from_file(str(PAIR / name / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(PAIR / name)
    ids = fast.encode(SOURCE).ids
    assert auto(SOURCE).input_ids == ids
    assert fast.decode(ids) == SOURCE
    assert auto.decode(ids, skip_special_tokens=True) == SOURCE
    assert ids[0] == auto.bos_token_id


def test_target_and_draft_share_one_tokenizer() -> None:
    assert (PAIR / "target" / "tokenizer.json").read_bytes() == (PAIR / "draft" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["target", "draft"])
def test_generation_ends_at_the_tokenizers_eos(name: str) -> None:
    auto = AutoTokenizer.from_pretrained(PAIR / name)
    assert GenerationConfig.from_pretrained(PAIR / name).eos_token_id == auto.eos_token_id
    vocabulary = json.loads((PAIR / name / "config.json").read_text())["vocab_size"]
    assert Tokenizer.from_file(str(PAIR / name / "tokenizer.json")).get_vocab_size() == vocabulary


def test_the_pair_has_learnt_python_and_the_draft_follows_the_target() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target, draft = load("target")[0], load("draft")[0]
    ids = tokenizer("class Stack:\n    def __init__(self):\n", return_tensors="pt").input_ids
    with torch.inference_mode():
        text = target.generate(ids, max_new_tokens=48, do_sample=False)
        best = [model(text).logits.argmax(-1)[0, ids.shape[1] - 1 : -1] for model in (target, draft)]
    assert "self." in tokenizer.decode(text[0, ids.shape[1] :])
    assert torch.equal(best[0], text[0, ids.shape[1] :])
    # Untrained models agree on one token in two thousand.
    assert (best[0] == best[1]).float().mean() > 0.5
