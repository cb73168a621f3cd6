"""The draft as a port, with a model and without."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.config import DraftSettings
from outrider.errors import ConfigError
from outrider.ports import Draft, Opened, Proposal
from outrider_draft.proposers.base import UNLIMITED_LENGTH
from outrider_draft.service import DraftService
from tests.support.core_driver import extend_item, open_session

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
DEADLINE_S = 240.0


def settings(**changes: Any) -> DraftSettings:
    return DraftSettings.model_validate({"page_size": 4, "num_pages": 64, **changes})


@pytest.fixture
async def draft(folder: Path) -> AsyncIterator[DraftService]:
    service = DraftService.load(settings(model=str(folder)))
    yield service
    await service.close()


async def propose(service: DraftService, tokens: list[int], draft_length: int) -> Proposal:
    link = await service.attach()
    link.send(
        [open_session(prompt_length=8, max_length=60, num_token_ids=257), extend_item(0, 2, tokens, draft_length)]
    )
    events = link.events()
    opened, batch = [await asyncio.wait_for(anext(events), DEADLINE_S) for _ in range(2)]
    await link.close()
    assert opened.events == (Opened(0, 1, 0),)
    (event,) = batch.events
    assert isinstance(event, Proposal)
    return event


async def test_a_draft_without_planes_has_no_stale_references() -> None:
    service = DraftService.with_ngram(min_n=1, max_n=3)
    found = [reading.value for reading in service.readings() if reading.name == "outrider_stale_references_total"]
    assert found == [0]
    await service.close()


async def test_a_model_describes_itself_and_proposes(draft: DraftService) -> None:
    port: Draft = draft
    facts = await port.describe()
    assert (facts.role, facts.architecture) == ("draft", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.num_token_ids, facts.num_pages) == (272, 257, 64)
    await draft.warm_up()
    assert len((await propose(draft, PROMPT, 4)).token_ids) == 4
    assert draft.runner is not None
    assert draft.runner.sequences.pool.num_free == 64


async def test_ngram_describes_itself_and_proposes() -> None:
    service = DraftService.load(settings(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3))
    facts = await service.describe()
    assert (facts.model_name, facts.architecture, facts.vocab_size) == ("ngram", "", 0)
    assert (facts.tokenizer_hash, facts.max_model_len) == ("", UNLIMITED_LENGTH)
    await service.warm_up()
    assert (await propose(service, [1, 2, 7, 8, 1, 2], 2)).token_ids == (7, 8)
    await service.close()


def test_a_draft_that_is_none_is_not_served() -> None:
    with pytest.raises(ConfigError, match="method"):
        DraftService.load(settings())


def test_ngram_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from outrider_draft.service import DraftService\n"
        "DraftService.with_ngram(min_n=1, max_n=2)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
