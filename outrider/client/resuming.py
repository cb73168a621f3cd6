"""Resumption: a generation over several calls, what was delivered, and the request of the next call.

Checks that the parts fit together. Makes no call; ``attempts`` decides where the next one goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

from outrider.errors import ProtocolError
from outrider.generation import (
    Delta,
    GenerationRequest,
    GenerationResult,
    Progress,
    Resumption,
    SpeculationStats,
    StageTimes,
    Started,
    Timing,
)
from outrider.types import TokenLogprob


class Generation(Protocol):
    """A generation that consists of one or several calls."""

    def next_request(self) -> GenerationRequest:
        """Return the request of the next call."""

    def take(self, delta: Delta) -> Delta | None:
        """Return what the user gets of a delta, if anything."""


class SingleGeneration:
    """A generation that is retried if it gave no output, and never resumed."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def next_request(self) -> GenerationRequest:
        """Return the request."""
        return self._request

    def take(self, delta: Delta) -> Delta:
        """Return the delta."""
        return delta


class ResumableGeneration:
    """A generation that resumes where the last call ended: no output is repeated or left out."""

    def __init__(self, request: GenerationRequest, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._request = replace(request, resumable=True)
        self._clock = clock
        self._began: float | None = None
        self._call_began = 0.0
        """Start of the current call, in seconds after the first call."""
        self._num_calls = 0
        self._started: Started | None = None
        """``Started`` of the first call that was answered."""
        self._is_answered = False
        """True if the current call has sent ``Started``."""
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._progress: Progress | None = None
        """Progress of the current call."""
        self._earlier: list[tuple[float, Progress]] = []
        """Start and progress of the interrupted calls."""

    def next_request(self) -> GenerationRequest:
        """Return the request that continues after the delivered output; the current call has ended."""
        if self._progress is not None:
            self._earlier.append((self._call_began, self._progress))
        self._progress, self._is_answered = None, False
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._call_began = now - self._began
        self._num_calls += 1
        return self._request if self._started is None else self._pinned(self._started)

    def take(self, delta: Delta) -> Delta | None:
        """Return what the user gets of a delta; ``ProtocolError`` if it does not continue the delivered output."""
        if delta.started is not None:
            self._begin(delta.started)
            return None
        if not self._is_answered:
            raise ProtocolError("the server does not say how to resume: it is older than resume=True")
        self._token_ids += delta.token_ids
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs or ()
        self._progress = delta.progress or self._progress
        result = None if delta.result is None else self._whole(delta.result)
        return Delta(delta.text, delta.token_ids, delta.logprobs, result)

    def _pinned(self, started: Started) -> GenerationRequest:
        """Fix all values that the first server chose: another one may have other defaults and another tokenizer."""
        request = self._request
        if started.prompt_token_ids is not None:
            request = replace(request, prompt=None, chat=None, prompt_token_ids=started.prompt_token_ids)
        # The model's length may have reduced max_tokens below min_tokens.
        changes: dict[str, Any] = {**started.sampling}
        changes["min_tokens"] = min(request.sampling.min_tokens, started.max_tokens)
        return replace(
            request,
            seed=started.seed,
            max_tokens=started.max_tokens,
            sampling=replace(request.sampling, **changes),
            defaulted=request.defaulted - started.sampling.keys(),
            acceptance_method=started.acceptance_method,
            request_id=started.request_id,
            resume=Resumption(tuple(self._token_ids), started.model),
        )

    def _begin(self, started: Started) -> None:
        if started.num_emitted_tokens != len(self._token_ids):
            said, delivered = started.num_emitted_tokens, len(self._token_ids)
            raise ProtocolError(f"the server resumed after {said} tokens, but {delivered} were delivered")
        self._started = self._started or started
        self._is_answered = True

    def _whole(self, result: GenerationResult) -> GenerationResult:
        if result.token_ids != tuple(self._token_ids):
            raise ProtocolError("the result holds other tokens than were delivered")
        if self._num_calls == 1:
            return result
        return replace(
            result,
            text="".join(self._texts),
            logprobs=None if result.logprobs is None else tuple(self._logprobs),
            speculation=add_statistics([*(progress.speculation for _, progress in self._earlier), result.speculation]),
            timing=self._timing(result.timing),
        )

    def _timing(self, last: Timing) -> Timing:
        """Times since the start of the first call; sums of the others."""
        calls = [*((began, progress.timing) for began, progress in self._earlier), (self._call_began, last)]
        parts = [timing for _, timing in calls]
        began, first = calls[0]
        return Timing(
            queue=sum(part.queue for part in parts),
            first_token=began + first.first_token,
            total=self._call_began + last.total,
            draft=sum(part.draft for part in parts),
            target=sum(part.target for part in parts),
            accept=sum(part.accept for part in parts),
            wire=sum(part.wire for part in parts),
            paused=sum(part.paused for part in parts),
            prefill=_sum_stages([part.prefill for part in parts]),
            grammar=sum(part.grammar for part in parts),
            mask=sum(part.mask for part in parts),
            num_drafts_ahead=sum(part.num_drafts_ahead for part in parts),
        )


def _sum_stages(parts: Sequence[StageTimes]) -> StageTimes:
    return StageTimes(
        draft=sum(part.draft for part in parts),
        target=sum(part.target for part in parts),
        accept=sum(part.accept for part in parts),
        wire=sum(part.wire for part in parts),
    )


def add_statistics(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Sum of the speculation statistics of several calls."""
    histogram = tuple(map(sum, zip_longest(*(part.acceptance_histogram for part in parts), fillvalue=0)))
    num_accepted, num_drafts = sum(part.num_accepted_tokens for part in parts), sum(histogram)
    return SpeculationStats(
        num_steps=sum(part.num_steps for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=num_accepted,
        num_judged_tokens=sum(part.num_judged_tokens for part in parts),
        acceptance_histogram=histogram,
        # Each step with a proposal gains one token besides the accepted ones.
        mean_acceptance_length=1 + num_accepted / num_drafts if num_drafts else 0.0,
        num_forced_tokens=sum(part.num_forced_tokens for part in parts),
        num_accepted_forced_tokens=sum(part.num_accepted_forced_tokens for part in parts),
    )
