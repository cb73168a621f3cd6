"""The method of a draft by its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.config import DraftSettings
from outrider.demo import DRAFT, EAGLE3
from outrider.errors import ConfigError, ModelError
from outrider.process.draft_methods import infer_method
from outrider.process.model_files import with_local_model

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def settings(**given: object) -> DraftSettings:
    return DraftSettings.model_validate(given)


@pytest.mark.parametrize(
    ("config", "name", "method"),
    [
        ({**LLAMA, "num_hidden_layers": 16}, "meta-llama/Llama-3.2-1B", "draft_model"),
        ({**LLAMA, "num_hidden_layers": 16}, "/models/eagle3-trained-draft", "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, "x", "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "x", "eagle3"),
        ({"speculators_model_type": "eagle"}, "x", "eagle"),
        ({"speculators_model_type": "dflash"}, "x", "dflash"),
        ({**LLAMA, "num_hidden_layers": 1}, "yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ({**LLAMA, "num_hidden_layers": 1}, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "x", "dflash"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "FasterDecoding/medusa-vicuna-7b", "medusa"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, "ibm-fms/llama3-8b-accelerator", "mlp_speculator"),
        ({"architectures": "no list", "num_hidden_layers": "1"}, "x", "draft_model"),
        ({}, "x", "draft_model"),
    ],
)
def test_the_method_is_what_the_folder_holds(config: dict[str, Any], name: str, method: str) -> None:
    assert infer_method(config, name) == method


def test_a_folder_of_unsupported_layers_is_refused_with_what_is_supported() -> None:
    with pytest.raises(
        ModelError, match=r"holds MTP layers .deepseek_mtp.; .* those inside the folder of a MiMo, Qwen3.5"
    ):
        infer_method({"model_type": "deepseek_mtp"}, "/models/mtp")


def test_a_draft_gets_the_method_unless_one_is_set() -> None:
    assert with_local_model(settings(model=str(EAGLE3))).method == "eagle3"
    assert with_local_model(settings(model=str(DRAFT))).method == "draft_model"
    assert with_local_model(settings(model=str(EAGLE3), method="eagle")).method == "eagle"


def test_a_head_runs_on_one_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ConfigError, match=r"draft.tensor_parallel_size: is 2; a head runs on one GPU"):
        with_local_model(settings(model=str(tmp_path), tensor_parallel_size=2))


def test_a_head_has_no_attention_window() -> None:
    with pytest.raises(ConfigError, match=r"draft.attention_window: is set, and .* is a head of method eagle3"):
        with_local_model(settings(model=str(EAGLE3), attention_window=64))
