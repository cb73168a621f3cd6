"""A user's own proposer: how it is named, what it gets, and what becomes of what it gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.config import DraftSettings, load
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError
from outrider.ports import DraftEvent, Extend, Open, Opened, Proposal, SessionFailed
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.types import JudgingRule, SamplingParams, SparseEvidence
from outrider_draft.proposers import base
from outrider_draft.proposers.base import DraftTokens, ProposalRequest, Proposer
from outrider_draft.proposers.custom import find_class
from outrider_draft.proposers.registry import LOADERS, LoadHooks, load_proposer, without_kv
from outrider_draft.service import build_core
from tests.draft_service.repeat_last import RepeatLast

PATH = "tests.draft_service.repeat_last:RepeatLast"
OPEN = Open(1, 1, SamplingParams(), 3, JudgingRule.REJECTION, prompt_length=4, max_length=100, num_token_ids=50)


def settings(path: str) -> DraftSettings:
    return load(DraftSettings, ["--method", path, "--num-speculative-tokens", "3"], {})


def answers(proposer: Proposer, *commands: Open | Extend) -> list[DraftEvent]:
    core = build_core(without_kv(proposer))
    events: list[DraftEvent] = []
    for command in commands:
        core.handle(0, [command])
        while core.has_work:
            events += [event for _, batch in core.step() for event in batch.events if not isinstance(event, Opened)]
    return events


def test_a_class_path_is_a_method() -> None:
    found = settings(PATH)
    assert (found.method, found.proposer) == (DraftMethod.CUSTOM_CLASS, PATH)
    served = load_proposer(found, LoadHooks())
    assert served.description.model_name == PATH
    core = build_core(served)
    core.handle(0, [OPEN, Extend(1, 2, 0, EMPTY_PREFIX, (5, 7, 7, 7, 7), draft_length=4)])
    events = [event for _ in range(2) for _, batch in core.step() for event in batch.events]
    (proposal,) = [event for event in events if isinstance(event, Proposal)]
    assert proposal.token_ids == (7, 7, 7)
    assert isinstance(proposal.evidence, SparseEvidence)
    assert proposal.evidence.probs.tolist() == [1, 1, 1]


def test_the_documented_example_is_the_one_tested_here() -> None:
    text = base.__doc__ or ""
    start = text.index("    from outrider_draft")
    example = "\n".join(line[4:] for line in text[start : text.index("    # outrider draft --method")].splitlines())
    names: dict[str, type[Proposer]] = {}
    ast.parse(example)
    exec(example, names)
    request = ProposalRequest(OPEN, [1, 2, 2], 4)
    assert names["RepeatLast"]().propose([request]) == RepeatLast().propose([request]) == [DraftTokens([2, 2])]


def test_the_page_for_users_shows_the_same_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "proposers.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    documented = (base.__doc__ or "").split("::\n")[1].split("# outrider draft")[0]
    assert shown.replace('"""', "'''").split() == documented.split()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:Class", "there is no module no_such_module"),
        ("tests.draft_service.repeat_last:Nobody", "has no class Nobody"),
        ("tests.draft_service.repeat_last:DraftTokens", "is no subclass of"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_class(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "Nothing.load should return a Nothing, a subclass of .*base.Proposer, and gave NoneType"),
        ("Unfinished", "Unfinished should define propose, as subclasses of .*base.Proposer do"),
    ],
)
def test_what_is_no_proposer_is_refused(name: str, said: str) -> None:
    path = f"tests.draft_service.repeat_last:{name}"
    with pytest.raises(ConfigError, match=f"draft.proposer: {path}: {said}"):
        load_proposer(settings(path), LoadHooks())


@pytest.mark.parametrize("argv", [["--method", "custom_class"], ["--method", "ngram", "--proposer", "a:B"]])
def test_class_and_method_go_together(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="goes with method custom_class"):
        load(DraftSettings, argv, {})


def test_every_method_but_none_has_a_loader() -> None:
    assert set(LOADERS) == set(DraftMethod) - {DraftMethod.NONE}


def test_a_proposer_that_raises_fails_its_sessions_and_not_the_service() -> None:
    failed, again = answers(
        find_class("tests.draft_service.repeat_last:Broken")(),
        OPEN,
        Extend(1, 2, 0, EMPTY_PREFIX, (5,), draft_length=1),
        replace(OPEN, generation=3),
        Extend(1, 4, 0, EMPTY_PREFIX, (5,), draft_length=1),
    )
    for event in (failed, again):
        assert isinstance(event, SessionFailed)
        assert "Broken failed: RuntimeError: no idea" in event.message


class Answering(Proposer):
    """Answers once with something that it may not, and then as it should."""

    def __init__(self, first: object) -> None:
        self._answers: Iterator[Any] = iter([first])

    def propose(self, requests: Sequence[ProposalRequest]) -> list[DraftTokens]:
        usual = [DraftTokens([5]) for _ in requests]
        return next(self._answers, usual)


_ONES = np.ones(1, dtype=np.float32)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (None, "Answering answered with NoneType: it should be a list with DraftTokens"),
        ((DraftTokens([5]) for _ in range(1)), "answered with generator"),
        ([[5]], "answer is list: it should be DraftTokens"),
        ([None], "answer is NoneType: it should be DraftTokens"),
        ([DraftTokens("5")], "cannot be read: 'str'"),  # type: ignore[arg-type]
        ([DraftTokens(None)], "cannot be read: 'NoneType'"),  # type: ignore[arg-type]
        ([DraftTokens([float("nan")])], "cannot be read: 'float'"),  # type: ignore[list-item]
        ([DraftTokens([5], [1.0])], "evidence is list: it should be SparseEvidence or None"),  # type: ignore[arg-type]
        ([DraftTokens([5], SparseEvidence([1], [5], _ONES))], "SparseEvidence.counts is list: it should be a NumPy"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_answer_of_another_kind_fails_its_session_and_not_the_service(first: object, said: str) -> None:
    failed, again = answers(
        Answering(first),
        OPEN,
        Extend(1, 2, 0, EMPTY_PREFIX, (5,), draft_length=1),
        replace(OPEN, generation=3),
        Extend(1, 4, 0, EMPTY_PREFIX, (5,), draft_length=1),
    )
    assert isinstance(failed, SessionFailed)
    assert said in failed.message
    assert isinstance(again, Proposal)
    assert again.token_ids == (5,)


class Noting(Proposer):
    """Proposes more than it may, and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], int, int]] = []

    def propose(self, requests: Sequence[ProposalRequest]) -> list[DraftTokens]:
        for request in requests:
            request.state["calls"] = request.state.get("calls", 0) + 1
            self.seen.append((list(request.token_ids), request.num_tokens, request.state["calls"]))
        return [DraftTokens([9, 8, 50, 7]) for _ in requests]


def test_a_proposer_sees_committed_tokens_alone_and_keeps_its_state() -> None:
    proposer = Noting()
    first, second = answers(
        proposer,
        OPEN,
        Extend(1, 2, 0, EMPTY_PREFIX, (1, 2), draft_length=4),
        # Nine was accepted: the draft is taken to hold it, as one with a KV cache does.
        Extend(1, 3, 3, prefix_hash([1, 2, 9]), (4,), draft_length=1),
    )
    assert isinstance(first, Proposal)
    assert isinstance(second, Proposal)
    assert (first.base_length, first.token_ids) == (2, (9, 8))
    assert (second.base_length, second.token_ids) == (4, (9,))
    assert proposer.seen == [([1, 2], 4, 1), ([1, 2, 9, 4], 1, 2)]
