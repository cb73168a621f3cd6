"""A client that answers from a script: every token is a function of the prompt, every message brings so many tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Unpack

from outrider.client import AsyncClient, GenerateOptions
from outrider.errors import CapacityError
from outrider.generation import Delta, GenerationResult, ModelInfo, SpeculationStats, Timing, Usage
from outrider.types import AcceptanceMethod, FinishReason, TokenLogprob

DRAFT_LENGTH = 3
INFO = ModelInfo(
    target_model="target",
    draft_model="draft",
    max_model_len=256,
    num_token_ids=100,
    eos_token_ids=(),
    num_speculative_tokens=DRAFT_LENGTH,
    acceptance_method=AcceptanceMethod.REJECTION,
    draft_attached=True,
    version="test",
    num_running=0,
    num_waiting=0,
    target_pages_free=1,
    draft_pages_free=1,
)


class ScriptedClient(AsyncClient):
    """Greedy text is the prompt's last token counted up; with speculation each message brings two tokens."""

    def __init__(
        self, *, lie_at: int | None = None, gap: float = 1.0, fail_prompts: frozenset[int] = frozenset()
    ) -> None:
        self.lie_at = lie_at
        """Index of the output token that is another one with speculation."""
        self.gap = gap
        """Gap of log-probabilities between the likeliest token and the one that a lie names."""
        self.fail_prompts = fail_prompts
        """Prompts whose first token is among these are refused."""
        self.requests: list[GenerateOptions] = []
        self.num_running = self.most_running = 0

    async def model_info(self) -> ModelInfo:
        return INFO

    async def generate(self, *_: Any, **options: Any) -> Any:
        async for delta in self.stream(**options):
            if delta.result is not None:
                return delta.result
        raise AssertionError("no result")

    async def stream(self, *_: Any, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Delta, None]:
        self.requests.append(options)
        prompt = tuple(options.get("prompt_token_ids") or ())
        if prompt[0] in self.fail_prompts:
            raise CapacityError("no room")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            tokens, length = self._tokens(prompt, options), 2 if self._is_speculative(options) else 1
            for begin in range(0, len(tokens), length):
                await asyncio.sleep(0)
                yield Delta("x", tokens[begin : begin + length])
            yield Delta("", (), result=self._result(prompt, tokens, options))
        finally:
            self.num_running -= 1

    def _is_speculative(self, options: GenerateOptions) -> bool:
        return options.get("num_speculative_tokens") != 0

    def _tokens(self, prompt: tuple[int, ...], options: GenerateOptions) -> tuple[int, ...]:
        tokens = [(prompt[-1] + 1 + index) % 100 for index in range(options.get("max_tokens") or 0)]
        if self.lie_at is not None and self._is_speculative(options) and self.lie_at < len(tokens):
            tokens[self.lie_at] = (tokens[self.lie_at] + 50) % 100
        return tuple(tokens)

    def _result(self, prompt: tuple[int, ...], tokens: tuple[int, ...], options: GenerateOptions) -> GenerationResult:
        num_drafts = len(tokens) // 2 if self._is_speculative(options) else 0
        top = ((tokens[0], -0.5), ((tokens[0] + 50) % 100, -0.5 - self.gap))
        return GenerationResult(
            text="x" * len(tokens),
            token_ids=tokens,
            finish_reason=FinishReason.LENGTH,
            matched_stop=None,
            logprobs=(TokenLogprob(tokens[0], -0.5, 1, top),) if options.get("logprobs") else None,
            prompt_logprobs=None,
            usage=Usage(len(prompt), len(tokens)),
            speculation=SpeculationStats(
                num_steps=num_drafts or len(tokens),
                # The last proposal is cut to what may still be wanted of it: one token, beside the target's own.
                num_draft_tokens=DRAFT_LENGTH * (num_drafts - 1) + 1 if num_drafts else 0,
                num_accepted_tokens=num_drafts,
                # Each step rejects one token, but the last one keeps all that it proposed.
                num_judged_tokens=2 * num_drafts - 1 if num_drafts else 0,
                acceptance_histogram=(0, num_drafts) if num_drafts else (),
                mean_acceptance_length=2.0 if num_drafts else 0.0,
            ),
            seed=options.get("seed") or 0,
            request_id="",
            timing=Timing(queue=0.0, first_token=0.1, total=1.0, draft=0.2, target=0.5, accept=0.1, wire=0.2),
        )
