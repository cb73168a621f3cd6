"""A generator without models: what the public service and the SDK are tested against.

It "generates" the ids 0, 1, 2, ... as the text "<0><1><2>...", one delta a token. Tests choose how far it may go, what
it raises, and see what it was asked for and how each generation ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from outrider.generation import (
    TO_THE_END,
    Delta,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    Progress,
    SpeculationStats,
    Started,
    Timing,
    TokenizerFiles,
    Usage,
)
from outrider.limits import ModelLimits
from outrider.types import AcceptanceMethod, FinishReason, TokenLogprob

DEFAULT_LENGTH = 16
"""Tokens of a request that names no most."""
INFO = ModelInfo(
    target_model="scripted",
    draft_model="",
    max_model_len=4096,
    num_token_ids=1000,
    eos_token_ids=(0, 7),
    num_speculative_tokens=4,
    acceptance_method=AcceptanceMethod.REJECTION,
    draft_attached=False,
    version="0",
    num_running=1,
    num_waiting=2,
    target_pages_free=3,
    draft_pages_free=4,
)


class ScriptedGenerator:
    """``transport.Generator`` for tests; used on one event loop."""

    def __init__(self, *, piece_size: int = 0) -> None:
        self.requests: list[GenerationRequest] = []
        self.deadlines: list[float | None] = []
        self.num_asked = 0
        self.num_emitted = 0
        self.num_finished = 0
        self.num_abandoned = 0
        """Generations that were closed before their end."""
        self.stop_after: int | None = None
        """Tokens after which a generation waits for ever."""
        self.error: Exception | None = None
        """Raised by the next generations, after ``error_after`` tokens."""
        self.error_after = 0
        self.failures: deque[tuple[int, Exception]] = deque()
        """Raised by one generation after the other, each when it comes to this token."""
        self.is_old = False
        """Knows nothing of resumption."""
        self.num_too_many = 0
        """Tokens it claims to go on from that nobody sent."""
        self.forgets_result = False
        """Ends without a result: a bug that must not go unnoticed."""
        self.tokenizer = TokenizerFiles({"tokenizer.json": b"{}"}, 3, "hash")
        self.texts: list[str] = []
        """Texts of the tokens, which then end the generation as an end of sequence does; none: numbers."""
        self.padding = "." * piece_size
        self._changed = asyncio.Event()

    def tokenizer_files(self) -> TokenizerFiles:
        return self.tokenizer

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(INFO.num_token_ids, INFO.max_model_len)

    async def model_info(self) -> ModelInfo:
        return INFO

    async def generate_stream(
        self,
        request: GenerationRequest,
        *,
        deadline_s: float | None = None,
        on_taken_in: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        if request.max_tokens == TO_THE_END:
            request = replace(request, max_tokens=len(self.texts) or DEFAULT_LENGTH)
        self.deadlines.append(deadline_s)
        self._note(num_asked=1)
        is_finished = False
        fails_at, failure = self.failures.popleft() if self.failures else (-1, None)
        first = len(request.resume.emitted_token_ids) if request.resume else 0
        try:
            if self.error is not None and self.error_after == 0:  # it is not taken in
                is_finished = True
                raise self.error
            if request.resumable and not self.is_old:
                yield Delta("", (), started=self._started(request, first))
            if first == request.max_tokens:
                is_finished = True
                yield Delta("", (), _logprobs(request, 0, 0), self._result(request, first))
            for token_id in range(first, request.max_tokens):
                if self.error is not None and token_id == self.error_after:
                    is_finished = True
                    raise self.error
                if failure is not None and token_id == fails_at:
                    is_finished = True
                    raise failure
                if self.stop_after == token_id:
                    await asyncio.Event().wait()
                self._note(num_emitted=1)
                result = self._result(request, first) if token_id + 1 == request.max_tokens else None
                is_finished = result is not None
                logprobs = _logprobs(request, token_id, token_id + 1)
                progress = self._progress(token_id + 1 - first) if request.resumable else None
                yield Delta(self._text(token_id), (token_id,), logprobs, result, progress=progress)
        finally:
            self._note(num_finished=int(is_finished), num_abandoned=int(not is_finished))

    async def until(self, **counts: int) -> None:
        """Wait until each named count is at least so high, within a deadline."""
        async with asyncio.timeout(240):
            while any(getattr(self, name) < count for name, count in counts.items()):
                self._changed.clear()
                await self._changed.wait()

    def _note(self, **increments: int) -> None:
        for name, increment in increments.items():
            setattr(self, name, getattr(self, name) + increment)
        self._changed.set()

    def _text(self, token_id: int) -> str:
        return self.texts[token_id] if self.texts else f"<{token_id}>{self.padding}"

    def _started(self, request: GenerationRequest, first: int) -> Started:
        return Started(
            seed=17 if request.seed is None else request.seed,
            prompt_token_ids=None if request.prompt is None else tuple(request.prompt.encode()),
            max_tokens=request.max_tokens,
            acceptance_method=request.acceptance_method or AcceptanceMethod.COUPLED,
            request_id=request.request_id or "made up",
            model=INFO.target_model,
            num_emitted_tokens=first + self.num_too_many,
        )

    @staticmethod
    def _progress(num_tokens: int) -> Progress:
        """Each step but the prefill has a proposal of two, none of which is accepted."""
        count = num_tokens - 1
        return Progress(
            SpeculationStats(num_tokens, 2 * count, 0, count, (count,) if count else (), float(count > 0)),
            Timing(0.125, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0),
        )

    def _result(self, request: GenerationRequest, first: int) -> GenerationResult | None:
        if self.forgets_result:
            return None
        count = request.max_tokens
        return GenerationResult(
            text="".join(map(self._text, range(count))),
            token_ids=tuple(range(count)),
            finish_reason=FinishReason.STOP if count == len(self.texts) else FinishReason.LENGTH,
            matched_stop=INFO.eos_token_ids[0] if count == len(self.texts) else None,
            logprobs=_logprobs(request, first, count),
            prompt_logprobs=None,
            usage=Usage(3, count),
            speculation=SpeculationStats(5, 4, 3, 4, (1, 0, 1), 2.5),
            seed=17 if request.seed is None else request.seed,
            request_id=request.request_id or "made up",
            timing=Timing(0.25, 0.5, 1.0),
        )


def _logprobs(request: GenerationRequest, start: int, stop: int) -> tuple[TokenLogprob, ...] | None:
    if request.logprobs is None:
        return None
    top = tuple((rank, -0.5 * rank) for rank in range(request.logprobs))
    return tuple(TokenLogprob(token_id, -0.25, 2, top) for token_id in range(start, stop))
