"""A draft and a target over rounds of proposing, scoring and rolling back; writes all they answer to a file, as JSON.

Run as a module, by ``test_gpu_path.py`` and ``distributed/test_gpu_path.py``: on a CPU as it is, on a CPU where Triton
interprets, so that all that a GPU would do is done there but the capture of graphs, and on a GPU. With a third
argument, target or draft, it is one of two ranks that share that model. Each must give the same answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.config import DraftSettings, TargetSettings
from outrider.kernels.launching import has_kernels
from outrider.model_executor.distributed.rank_info import find_rank
from outrider.model_executor.distributed.runner import follow_model, open_runner
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Open, Proposal, Score, Scores
from outrider.recording import AnyRecord, ItemRecord
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.step import DecodeBatch
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.types import (
    AcceptanceMethod,
    SamplingParams,
    SparseEvidence,
    SparseScores,
    Support,
    TokenScores,
    TypicalScores,
)
from outrider_draft.batch_forward import LoopForward
from outrider_draft.proposers.draft_model import ModelProposer, ProposalJob
from outrider_draft.service import build_model_core
from outrider_target.executor import next_token
from outrider_target.jobs import ScoreJob
from outrider_target.scoring_forward import ScoringForward
from outrider_target.service import build_core
from tests.support.async_target import AsyncTargetExecutor, lookahead_core
from tests.support.core_driver import Driver, extend_item, open_session, score_item, with_credit
from tests.support.quick_interpreter import set_up_quick_interpreter
from tests.support.tiny_models import cached_tiny_model

VOCAB_SIZE, NUM_IDS = 261, 257
RULES = DraftingRules(support_mass=0.98, support_limit=256)
REJECTION, COUPLED, TYPICAL = AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL
REQUESTS: list[tuple[AcceptanceMethod, dict[str, Any]]] = [
    (REJECTION, {"temperature": 0.0}),
    (COUPLED, {"temperature": 0.8}),
    (REJECTION, {"temperature": 1.0}),
    (REJECTION, {"temperature": 0.9, "top_p": 0.9}),
    (TYPICAL, {"temperature": 0.7, "min_tokens": 9}),
]
PROMPTS = [5, 7, 3, 6, 20]
"""Tokens of each request's prompt; the last comes when the others are running, and is prefilled beside them."""
LATE = len(PROMPTS) - 1
MAX_LENGTH = 60
NUM_COLUMN_STEPS = 3
SIZES: Any = {"page_size": 4, "num_pages": 200, "max_model_len": MAX_LENGTH + 16}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
"""All layers but the first have a window, and window pages."""
MODELS: dict[str, dict[str, Any]] = {
    "target": {"architecture": "qwen2", "seed": 1, **SLIDING},
    "draft": {"architecture": "qwen2", "seed": 2, "num_hidden_layers": 2, **SLIDING},
}
GROUPED: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}

ROUNDS = [(0, 1, 2, 3), (0, 1, 2, LATE), (1, LATE), (0, 2, 3)]
"""Requests that are served together."""

Answer = dict[str, Any]


def load(architecture: str, device: str, dtype: str, **model: Any) -> ModelRunner:
    folder = cached_tiny_model(architecture, vocab_size=VOCAB_SIZE, **GROUPED, **model)
    runner = ModelRunner.load(folder, device=device, dtype=dtype, drafting=RULES, **SIZES)
    assert (runner.drafting is not None) == has_kernels(torch.device(device))
    return prepared(runner)


def prepared(runner: ModelRunner) -> ModelRunner:
    runner.capture()
    if runner.sequences.window is not None:
        give_window_pages_other_numbers(runner)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))  # a stale read would show
    return runner


def give_window_pages_other_numbers(runner: ModelRunner) -> None:
    """A sequence holds pages, of which some have no window page any more."""
    manager, longest = runner.sequences, runner.max_model_len
    sequence = manager.open(longest)
    manager.extend(sequence, [0] * longest)
    manager.commit(sequence, longest)
    assert manager.window is not None
    assert manager.window.pool.num_used < manager.pool.num_used


def shared_settings(role: str, device: str) -> TargetSettings | DraftSettings:
    """The model of one role, shared by two ranks."""
    folder = cached_tiny_model(vocab_size=VOCAB_SIZE, **GROUPED, **MODELS[role])
    sharing = {"device": device, "dtype": "float32", "tensor_parallel_size": 2, "num_threads": 1, **SIZES}
    if role == "target":
        return TargetSettings.model_validate({"model": str(folder), **sharing})
    rules = {"support_mass": RULES.support_mass, "support_limit": RULES.support_limit}
    return DraftSettings.model_validate({"model": str(folder), **sharing, **rules})


def open_model(role: str, device: str, shared: str) -> ModelRunner:
    if role == shared:
        runner = prepared(open_runner(shared_settings(role, device)))
        assert runner.tensor_parallel_size == 2
    else:
        runner = load(device=device, dtype="float32", **MODELS[role])
    assert runner.sequences.window is not None
    return runner


def opened(session: int) -> Open:
    method, sampling = REQUESTS[session]
    return open_session(
        session, prompt_length=PROMPTS[session], max_length=MAX_LENGTH, num_token_ids=NUM_IDS, seed=900 + session,
        acceptance_method=method, sampling=SamplingParams(**sampling), eos_token_ids=(1, 2),
    )  # fmt: skip


TRACED = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class GraphUse:
    """Recorder of what traces say of CUDA graphs: for each forward of a traced item, whether one was replayed."""

    def __init__(self) -> None:
        self.used: list[bool] = []

    def ended(self, records: Sequence[AnyRecord]) -> None:
        items = [record for record in records if isinstance(record, ItemRecord)]
        self.used += [forward.used_graph for item in items for forward in item.forwards]


def play(draft: ModelRunner, target: ModelRunner) -> tuple[list[Answer], int]:
    """Answers of both, round by round, and the steps of the draft; random numbers of drafts are kept, so much is rolled
    back.
    """
    proposer = ModelProposer(draft)
    drafting = Driver(build_model_core(proposer, max_batched_tokens=40))
    scoring = Driver(build_core(target, max_batched_tokens=40))
    drafting.core.recorder, scoring.core.recorder = recorders = GraphUse(), GraphUse()
    choose = random.Random(5)
    texts = [[choose.randrange(NUM_IDS) for _ in range(length)] for length in PROMPTS]
    held = {"draft": [0] * len(texts), "target": [0] * len(texts)}
    answers: list[Answer] = []
    for number, asked in enumerate(ROUNDS):
        opening = [opened(session) for session in asked if not held["target"][session]]
        extends = [
            extend_item(session, 2 + number, texts[session], 1 + (session + number) % 4, num_kept_tokens=base)
            for session in asked
            for base in [held["draft"][session]]
        ]
        trace_parent = TRACED if number == len(ROUNDS) - 1 else ""
        proposals = answers_of(drafting, opening, [replace(item, trace_parent=trace_parent) for item in extends])
        items = [score(proposals[session], texts[session], held["target"][session]) for session in asked]
        scores = answers_of(scoring, opening, [replace(item, trace_parent=trace_parent) for item in items])
        answers += [written(proposals[session]) | written(scores[session]) for session in asked]
        for session in asked:
            drafts = proposals[session].token_ids
            kept = choose.randint(0, len(drafts))
            length = len(texts[session])
            held["draft"][session] = length + min(kept, max(0, len(drafts) - 1))
            held["target"][session] = length + kept
            texts[session] += [*drafts[:kept], choose.randrange(NUM_IDS)]
        draft.sequences.check_integrity()
        target.sequences.check_integrity()
    is_captured = has_kernels(target.device)
    of_draft, of_target = (recorder.used for recorder in recorders)
    assert of_target
    assert all(used is is_captured for used in of_target)
    assert any(of_draft) is is_captured
    return answers, drafting.num_steps


def answers_of(driver: Driver, opening: Sequence[Open], items: Sequence[Extend] | Sequence[Score]) -> dict[int, Any]:
    answers = {event.session: event for event in driver.run(*opening, *items)}
    assert sorted(answers) == sorted(item.session for item in items)
    return answers


def score(proposal: Proposal, text: list[int], held: int) -> Score:
    evidence = proposal.evidence
    support = Support(evidence.counts, evidence.token_ids) if isinstance(evidence, SparseEvidence) else None
    return score_item(
        proposal.session,
        proposal.generation,
        text,
        proposal.token_ids,
        num_kept_tokens=held,
        support=support,
    )


def written(event: Any) -> Answer:
    """Plain numbers; the tokens of a support by their ids, for equals may stand in any order."""
    if isinstance(event, Proposal):
        found: Answer = {"drafts": list(event.token_ids)}
        if isinstance(event.evidence, SparseEvidence):
            rows = np.repeat(np.arange(len(event.evidence.counts)), event.evidence.counts)
            order = np.lexsort((event.evidence.token_ids, rows))
            found["support_ids"] = event.evidence.token_ids[order].tolist()
            found["support_probs"] = event.evidence.probs[order].tolist()
        return found
    assert isinstance(event, Scores), event
    form = event.form
    if isinstance(form, TokenScores):
        return {"tokens": list(form.token_ids)}
    if isinstance(form, TypicalScores):
        reals = {"probs": form.draft_token_probs, "entropies": form.entropies}
        return {"argmaxes": form.argmax_token_ids.tolist(), "bonus": form.bonus_token_id} | {
            name: numbers.tolist() for name, numbers in reals.items()
        }
    assert isinstance(form, SparseScores)
    reals = {"outside_mass": form.outside_mass.tolist(), "support_probs": form.support_probs.tolist()}
    return {"outside": form.outside_token_ids.tolist()} | reals


def narrow_logits(device: str) -> list[list[float]]:
    """Logits of a 16-bit model, whose products of few rows have kernels of their own: one token, a few, many."""
    runner = load("qwen2", device, "float16", seed=3, num_hidden_layers=1)
    first, second = runner.sequences.open(40), runner.sequences.open(40)
    third = runner.sequences.open(40)
    eight = list(range(20, 28))
    logits = [runner.forward([ForwardRow(first, [7, 8, 9, 10, 11], 5), ForwardRow(second, [5], 1)])]
    logits.append(runner.forward([ForwardRow(row, eight, 2) for row in (first, second, third)]))
    runner.sequences.truncate(first, 9)
    logits += [runner.forward([ForwardRow(row, [12], 1)]) for row in (first, second)]
    return torch.cat(logits).tolist()


def lookahead_steps(target: ModelRunner) -> tuple[list[list[int]], int]:
    """The texts of four requests after steps without drafts, one of which ends before the others; how many of their
    items were started before the one before had ended.
    """
    scorer = AsyncTargetExecutor(target)
    driver = Driver(lookahead_core(scorer, max_batched_tokens=40))
    num_used = target.sequences.pool.num_used
    texts, ends = [[3 + i, 5, 7] for i in range(4)], [10, 8, 10, 10]
    driver.send(*(replace(opened(i), max_length=end) for i, end in enumerate(ends)))
    for number in range(max(ends)):
        running = [i for i, end in enumerate(ends) if len(texts[i]) < end]
        for i in running:
            num_kept_tokens = len(texts[i]) - 1 if number else 0
            driver.send(*with_credit(score_item(i, 2 + number, texts[i], num_kept_tokens=num_kept_tokens)))
        answered: set[int] = set()
        while len(answered) < len(running):
            for event in driver.step():
                token_id = next_token(event.form)
                assert token_id is not None
                texts[event.session].append(token_id)
                answered.add(event.session)
        target.sequences.check_integrity()
    driver.core.drop_link(driver.link_id)
    assert target.sequences.pool.num_used == num_used
    return texts, scorer.num_queued


def opened_together(core: Any, kinds: Sequence[int]) -> tuple[Driver, list[list[int]], list[int]]:
    """A driver with a session of each kind, their texts, and how many tokens of each are computed."""
    driver = Driver(core)
    driver.send(*(replace(opened(kind), session=i, max_length=40) for i, kind in enumerate(kinds)))
    return driver, [[3 + i, 5, 7, 11][: 2 + i % 3] for i in range(len(kinds))], [0] * len(kinds)


def batch_steps(target: ModelRunner, kinds: Sequence[int]) -> list[Answer]:
    """Answers of a target to steps with drafts that come as columns, from sessions whose scores are of one form."""
    scorer, choose = BatchExecutor(target), random.Random(kinds[0])
    driver, texts, kept = opened_together(lookahead_core(scorer, max_batched_tokens=60), kinds)
    answers: list[Answer] = []
    for number in range(NUM_COLUMN_STEPS):
        drafts = [[choose.randrange(NUM_IDS) for _ in range(choose.randint(1, 3))] if number else [] for _ in kinds]
        supports = [support_of([{token_id, 9} for token_id in own]) if kinds[0] > 1 and own else None for own in drafts]
        items = [
            score_item(i, 2 + number, texts[i], drafts[i], num_kept_tokens=kept[i], support=supports[i])
            for i in range(len(kinds))
        ]
        message = target_commands_to_proto(items)
        events = driver.run(*target_commands_from_proto(message))
        answers += map(written, sorted(events, key=attrgetter("session")))
        for i, text in enumerate(texts):
            num_accepted = choose.randint(0, len(drafts[i]))
            kept[i] = len(text) + num_accepted
            text += [*drafts[i][:num_accepted], choose.randrange(NUM_IDS)]
        target.sequences.check_integrity()
    assert scorer.num_columns == NUM_COLUMN_STEPS - 1, scorer.num_columns  # all but the prompts
    driver.core.drop_link(driver.link_id)
    return answers


def batch_drafts(draft: ModelRunner, kinds: Sequence[int]) -> list[Answer]:
    """Answers of a draft to steps that come as columns, from sessions whose evidence is of one form."""
    proposer, choose = BatchProposer(draft), random.Random(kinds[0])
    driver, texts, kept = opened_together(build_model_core(proposer, max_batched_tokens=60), kinds)
    answers: list[Answer] = []
    for number in range(NUM_COLUMN_STEPS):
        items = [
            extend_item(i, 2 + number, texts[i], 1 + (i + number) % 4, num_kept_tokens=kept[i])
            for i in range(len(kinds))
        ]
        message = draft_commands_to_proto(items)
        proposals: list[Any] = driver.run(*draft_commands_from_proto(message))
        proposals.sort(key=attrgetter("session"))
        answers += map(written, proposals)
        for i, text in enumerate(texts):
            drafts = proposals[i].token_ids
            num_accepted = choose.randint(0, len(drafts))
            kept[i] = len(text) + min(num_accepted, len(drafts) - 1)
            text += [*drafts[:num_accepted], choose.randrange(NUM_IDS)]
        draft.sequences.check_integrity()
    # All but the prompts, which are answered together.
    assert proposer.num_columns == (NUM_COLUMN_STEPS - 1 if draft.drafting is not None else 0), proposer.num_columns
    driver.core.drop_link(driver.link_id)
    return answers


class BatchProposer(ModelProposer):
    """Counts the steps that come as columns."""

    num_columns = 0

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[ProposalJob, int]] = ()
    ) -> LoopForward:
        self.num_columns += 1
        return super().start_step(step, batch)


class BatchExecutor(AsyncTargetExecutor):
    """Counts the steps that come as columns."""

    num_columns = 0

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[ScoreJob, int]] = ()
    ) -> ScoringForward:
        self.num_columns += isinstance(step, DecodeBatch)
        return super().start_step(step, batch)


def support_of(rows: Sequence[set[int]]) -> Support:
    ids = [token_id for row in rows for token_id in sorted(row)]
    return Support(np.array(list(map(len, rows)), dtype=np.int32), np.array(ids, dtype=np.int32))


def poison_empty() -> None:
    """Memory that is allocated is filled with values that would show if they were read before they are written."""
    plain_empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = plain_empty(*size, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 10**9) if tensor.numel() else tensor

    torch.empty = poisoned


def main(device: str, path: Path, shared: str = "") -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        set_up_quick_interpreter()
    if shared and (place := find_rank(2)).rank:
        follow_model(shared_settings(shared, device), place)
        return
    target = open_model("target", device, shared)
    target.sampler.warm_up(VOCAB_SIZE, target.dtype, target.device)
    draft = open_model("draft", device, shared)
    poison_empty()
    found: dict[str, Any] = {}
    with contextlib.closing(target), contextlib.closing(draft), torch.inference_mode():
        if shared != "target":
            found["answers"], found["draft_steps"] = play(draft, target)
        if not shared:
            found["drafts"] = batch_drafts(draft, (0, 1, 0, 1, 0)) + batch_drafts(draft, (2, 3, 3, 2))
        if shared != "draft":
            found["columns"] = batch_steps(target, (0, 1, 0, 1, 0)) + batch_steps(target, (2, 3, 3, 2))
            found["texts"], num_queued = lookahead_steps(target)
            assert bool(num_queued) == has_kernels(torch.device(device))
        if not shared:
            found["narrow"] = narrow_logits(device)
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
