"""DFlash: drafts a block of tokens in one forward over the states of several of the target's layers.

Source: Chen et al., "DFlash", 2026. The drafter is ``outrider.model_executor.draft_heads.dflash``'s. Sessions are kept
up to date as those of other heads: a state of the target takes the place of a pair. What differs is here: all tokens of
a proposal come from one forward, each drawn from its own distribution whatever was drawn at the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.model_executor.draft_heads.block_runner import BlockRunner
from outrider.ports import Extend
from outrider.sampling.parameters import needs_history
from outrider.sampling.rows import LogitRow
from outrider.serving.decode.sessions import Ints
from outrider.serving.decode.step import DecodeBatch
from outrider_draft.proposers.head_executor import HeadExecutor, HeadJob, HeadSession
from outrider_draft.proposers.passes import single


class BlockExecutor(HeadExecutor):
    """Proposes with one block drafter."""

    def __init__(self, runner: BlockRunner) -> None:
        super().__init__(runner)
        self.block_runner = runner
        """Runner that drafts a block in one forward."""
        self._longest = runner.block_head.config.block_size - 1

    def num_drafted(self, job: HeadJob) -> int:
        """The job's block."""
        return job.draft_length + 1 if job.draft_length else 0

    def begin(self, session: HeadSession, item: Extend) -> HeadJob:
        """Begin a step as any head does; no more tokens than a block has."""
        job = super().begin(session, item)
        job.draft_length = min(job.draft_length, self._longest)
        return job

    def lengths(self, step: DecodeBatch) -> Ints:  # [B]
        """Draft lengths as of any head; no more tokens than a block has."""
        return np.minimum(super().lengths(step), self._longest)

    def _draft(self, jobs: list[HeadJob], hidden: torch.Tensor, normed: torch.Tensor, indices: list[int]) -> None:
        blocks = [(job.kv, job.sequence.text.token_ids[-1], job.draft_length) for job in jobs]
        logits = self.block_runner.draft_block(blocks)  # [N, V]
        likeliest = logits.argmax(-1).tolist() if any(_reads_history(job) for job in jobs) else []
        rows: list[LogitRow] = []
        for job in jobs:
            rows += _rows(job, likeliest[len(rows) :])
        drawn = iter(self.runner.sampler.propose(logits, rows))
        for job in jobs:
            for one in [next(drawn) for _ in range(job.draft_length)]:
                if job.draws and job.draws[-1].error is not None:
                    break
                job.draws.append(single(one))


def _reads_history(job: HeadJob) -> bool:
    return needs_history(job.state.sampling.open.sampling)


def _rows(job: HeadJob, likeliest: Sequence[int]) -> list[LogitRow]:
    """Rows of the drafted tokens; penalties count the likeliest tokens before each, since none are drawn yet."""
    text: Sequence[int] = job.sequence.text.token_ids
    if _reads_history(job):
        text = [*text, *likeliest[: job.draft_length]]
    return [LogitRow(job.state.sampling, text, job.base + i, job.base) for i in range(job.draft_length)]
