"""The target as a port: described, attached to, closed, and broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import TargetSettings
from outrider.errors import ConfigError, ModelError, UnavailableError
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.worker import Worker
from outrider.ports import Opened, Scores, Target, TargetEvent
from outrider.types import TokenScores
from outrider_target.service import TargetService
from tests.support.core_driver import open_session, score_item
from tests.support.tiny_models import build_tiny_model

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
NUM_IDS = 257
DEADLINE_S = 240.0


def settings(folder: Path, **changes: Any) -> TargetSettings:
    return TargetSettings.model_validate({"model": str(folder), "page_size": 4, "num_pages": 64, **changes})


@pytest.fixture
async def target(folder: Path) -> AsyncIterator[TargetService]:
    service = TargetService.load(settings(folder, max_batched_tokens=8))
    yield service
    await service.close()


async def next_event(events: AsyncIterator[Any]) -> TargetEvent:
    event: Any = None
    while event is None or isinstance(event, Opened):
        batch = await asyncio.wait_for(anext(events), DEADLINE_S)
        (event,) = batch.events
    return event  # type: ignore[no-any-return]


def opened(session: int, **changes: Any) -> Any:
    return open_session(session, **{"prompt_length": 8, "max_length": 60, "num_token_ids": NUM_IDS, **changes})


async def test_it_describes_itself(target: TargetService, folder: Path) -> None:
    port: Target = target
    facts = await port.describe()
    assert (facts.role, facts.architecture) == ("target", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.num_token_ids, facts.max_model_len) == (272, 257, 256)
    assert (facts.dtype, facts.device, facts.page_size, facts.num_pages) == ("float32", "cpu", 4, 64)
    assert facts.eos_token_ids == (256,)
    assert facts.tokenizer_files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert facts.tokenizer_hash
    assert facts.version


async def test_greedy_through_the_port_equals_generate(target: TargetService, reference: Any) -> None:
    await target.warm_up()
    with torch.inference_mode():
        reference.generation_config.eos_token_id = None
        truth = reference.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, 8:].tolist()
    link = await target.attach()
    events = link.events()
    link.send([opened(0)])
    tokens, held = list(PROMPT), 0
    for generation in range(2, 14):
        link.send([score_item(0, generation, tokens, num_kept_tokens=held)])
        event = await next_event(events)
        assert isinstance(event, Scores)
        assert isinstance(event.form, TokenScores)
        held = len(tokens)
        tokens.append(event.form.token_ids[0])
    assert tokens[8:] == truth
    await link.close()
    assert target.runner.sequences.pool.num_free == 64


async def test_closing_a_link_frees_its_pages_in_the_middle_of_a_prefill(target: TargetService) -> None:
    first, second = await target.attach(), await target.attach()
    first.send([opened(0, max_length=100), score_item(0, 2, list(range(90)))])
    second.send([opened(0)])
    await first.close()
    second.send([score_item(0, 2, PROMPT)])
    assert isinstance(await next_event(second.events()), Scores)
    assert target.runner.sequences.pool.num_used == target.runner.sequences.pool.pages_for(len(PROMPT))
    await second.close()
    target.runner.sequences.check_integrity()
    assert target.runner.sequences.pool.num_free == 64


async def test_a_device_error_breaks_links_and_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []
    service = TargetService.load(settings(folder), on_failure=failures.append)

    def fail(*_given: Any, **_options: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(service.runner, "forward_batch", fail)
    links = [await service.attach(), await service.attach()]
    links[0].send([opened(0), score_item(0, 2, PROMPT)])
    for link in links:
        with pytest.raises(UnavailableError, match="device lost"):
            await next_event(link.events())
    await service.close()
    assert [str(failure) for failure in failures] == ["device lost"]
    with pytest.raises(UnavailableError):
        await service.attach()


def test_what_cannot_be_served_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        TargetService.load(settings(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="max_model_len"):
        TargetService.load(settings(folder, max_model_len=100_000))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda"):
            TargetService.load(settings(folder, device="cuda"))


def test_tokens_that_the_model_has_no_row_for_are_not_offered(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<extra>"] = 272
    (folder / "tokenizer.json").write_text(json.dumps(content))
    description = TargetService.load(settings(folder)).description
    assert (description.num_token_ids, description.vocab_size) == (272, 272)


def test_every_end_token_and_the_type_of_the_weights(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model", dtype=torch.bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    service = TargetService.load(settings(folder))
    assert service.description.eos_token_ids == (256, 7)
    assert service.description.dtype == "float32"
    assert TargetService.load(settings(folder, dtype="bfloat16")).description.dtype == "bfloat16"


def test_layers_whose_states_graphs_hand_out_are_those_of_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load = Worker.load.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Worker], /, folder: Path, **options: Any) -> Worker:
        asked.append(options["hidden_state_layers"])
        found: Worker = load(cls, folder, **options)
        return found

    monkeypatch.setattr(Worker, "load", classmethod(noted))
    for layers in (None, "2,0,-1,2"):
        open_runner(settings(folder, hidden_state_layers=layers)).close()
    assert asked == [(), (-1, 0, 2)]


def test_a_layer_that_the_model_has_not_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "load", classmethod(lambda cls, folder, **options: pytest.fail("it was loaded")))
    with pytest.raises(
        ConfigError, match=r"names layer 99, and .* has states 0, the embedding, to \d+, or -1"
    ) as raised:
        TargetService.load(settings(folder, hidden_state_layers="1,99"))
    assert raised.value.field == "hidden_state_layers"


@pytest.mark.parametrize("layers", ["2,16,29", "[2, 16, 29]", [2, 16, 29], "2, 16,29"])
def test_layers_are_written_as_lists_or_with_commas(layers: Any) -> None:
    assert settings(Path("m"), hidden_state_layers=layers).hidden_state_layers == "2,16,29"


@pytest.mark.parametrize("layers", ["two", "1,,2", "-2", "1.5", [True]])
def test_what_is_no_layer_is_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="numbers of layers such as 2,16,29"):
        settings(Path("m"), hidden_state_layers=layers)
