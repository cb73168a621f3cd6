"""A generator without models: what the public service and the SDK are tested against.

It "generates" the ids 0, 1, 2, ... as the text "<0><1><2>...", one delta a token. Tests choose how far it may go, what
it raises, and see what it was asked for and how each generation ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from outrider.generation import (
    Delta,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    SpeculationStats,
    Timing,
    Usage,
)
from outrider.limits import ModelLimits
from outrider.types import AcceptanceMethod, FinishReason, TokenLogprob

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
        self.num_emitted = 0
        self.num_finished = 0
        self.num_abandoned = 0
        """Generations that were closed before their end."""
        self.stop_after: int | None = None
        """After so many tokens a generation waits for ever."""
        self.error: Exception | None = None
        """Raised by the next generations, after ``error_after`` tokens."""
        self.error_after = 0
        self.forgets_result = False
        """Ends without a result: a bug that must not go unnoticed."""
        self._padding = "." * piece_size
        self._changed = asyncio.Event()

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(INFO.num_token_ids, INFO.max_model_len)

    async def model_info(self) -> ModelInfo:
        return INFO

    async def generate_stream(
        self, request: GenerationRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.deadlines.append(deadline_s)
        is_finished = False
        try:
            for token_id in range(request.max_tokens):
                if self.error is not None and token_id == self.error_after:
                    is_finished = True
                    raise self.error
                if self.stop_after == token_id:
                    await asyncio.Event().wait()
                self._note(num_emitted=1)
                result = self._result(request) if token_id + 1 == request.max_tokens else None
                is_finished = result is not None
                yield Delta(self._text(token_id), (token_id,), _logprobs(request, token_id, token_id + 1), result)
        finally:
            self._note(num_finished=int(is_finished), num_abandoned=int(not is_finished))

    async def until(self, **counts: int) -> None:
        """Wait until each named count is at least so high, within a deadline."""
        async with asyncio.timeout(20):
            while any(getattr(self, name) < count for name, count in counts.items()):
                self._changed.clear()
                await self._changed.wait()

    def _note(self, **increments: int) -> None:
        for name, increment in increments.items():
            setattr(self, name, getattr(self, name) + increment)
        self._changed.set()

    def _text(self, token_id: int) -> str:
        return f"<{token_id}>{self._padding}"

    def _result(self, request: GenerationRequest) -> GenerationResult | None:
        if self.forgets_result:
            return None
        count = request.max_tokens
        return GenerationResult(
            text="".join(map(self._text, range(count))),
            token_ids=tuple(range(count)),
            finish_reason=FinishReason.LENGTH,
            matched_stop=None,
            logprobs=_logprobs(request, 0, count),
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
