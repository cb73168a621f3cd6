"""Input processor: turns a request into an ``EngineRequest``: validated, tokenized, seeded, limited to the models."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import CoordinatorSettings
from outrider.config.fields import GenerationConfig, RejectionSampleMethod, SchedulingPolicy
from outrider.cooperative import Work, is_long, slices_of
from outrider.errors import InvalidRequestError
from outrider.generation import DEFAULTABLE, TO_THE_END, GenerationRequest, Started
from outrider.limits import BAD_WORDS_TOKENS, ModelLimits
from outrider.packed_ids import pack_long
from outrider.requests import checks_against_model, checks_of_request, checks_of_sampling
from outrider.structured_output import GrammarCompiler, Matcher
from outrider.tokenization import ModelText, TextTokenizer
from outrider.tokenization.sampling_defaults import MAX_NEW_TOKENS
from outrider.types import ModelDescription, SamplingParams
from outrider_coordinator.acceptance import JudgeRules, judging_rule
from outrider_coordinator.routing.placement import capacity, check_capacity
from outrider_coordinator.session.engine_request import EngineRequest

Runs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokenized texts of a request."""

    prompt_token_ids: tuple[int, ...]
    bad_words: Runs
    matcher: Matcher | None = None
    grammar_ns: tuple[int, int] | None = None
    """Readings of ``time.perf_counter_ns`` before and after its grammar was compiled, or found compiled."""


class InputProcessor:
    """Prepares requests for one target."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        target: ModelDescription,
        text: ModelText,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """``grammars`` compiles for the target's tokenizer."""
        self.text = text
        self._settings = settings
        self._target = target
        self.grammars = grammars

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The target's tokenizer, or its replacement."""
        return self.text.tokenizer

    @property
    def model_name(self) -> str:
        """The target's name."""
        return self._target.model_name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens of the model's configuration, and that of the tokenizer: as in vLLM, each ends a generation."""
        own, known = self.text.eos_token_id, self._target.eos_token_ids
        if own is None or own in known or own >= self._target.num_token_ids:
            return known
        return (*known, own)

    @property
    def limits(self) -> ModelLimits:
        """The target's limits."""
        return ModelLimits(self._target.num_token_ids, self._target.max_model_len)

    # Steps from a request to an ``EngineRequest``, in this order; ``InvalidRequestError`` names the invalid field. A
    # ``Work`` yields between slices, so that an event loop can do other work between them.

    def checking(self, request: GenerationRequest) -> Work[None]:
        """Raise ``InvalidRequestError`` for errors that can be found before tokenizing."""
        if request.chat is not None:
            self.text.chat.check_template(request.chat)
        yield from checks_of_request(request)
        self._check_settings(request)
        self._check_model(request)

    async def render(self, request: GenerationRequest) -> str:
        """The prompt text of a checked request's chat; empty without a chat."""
        return "" if request.chat is None else await self.text.rendering.render(request.chat)

    def tokenize(self, request: GenerationRequest, rendered: str) -> Tokenized:
        """Tokenize prompt and bad words of a checked request, whose chat was ``rendered``. Call it in a thread for long
        texts and grammars, which take long.
        """
        prompt, bad_words = pack_long(self._prompt(request, rendered)), self._bad_words(request)
        began_ns = time.perf_counter_ns()
        matcher = self._matcher(request)
        grammar_ns = None if matcher is None else (began_ns, time.perf_counter_ns())
        return Tokenized(prompt, bad_words, matcher, grammar_ns)

    def processing(self, request: GenerationRequest, texts: Tokenized) -> Work[EngineRequest]:
        """Prepare a checked request."""
        prompt, target = texts.prompt_token_ids, self._target
        yield from checks_against_model(
            request, prompt, num_token_ids=target.num_token_ids, max_model_len=target.max_model_len
        )
        max_tokens = self._max_tokens(request, len(prompt))
        sampling = yield from self._sampling(request, texts.bad_words)
        method = request.acceptance_method or self._settings.acceptance_method
        rules = JudgeRules(
            judging_rule(method, temperature=sampling.temperature),
            target.num_token_ids,
            self._settings.posterior_threshold,
            self._settings.posterior_alpha,
            verifies_blocks=self._settings.rejection_sample_method is RejectionSampleMethod.BLOCK,
        )
        # None where a draft could change the output, and drafts are not trusted.
        may_draft = self._settings.trusted_drafts or rules.is_of_target_alone
        return EngineRequest(
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=secrets.randbits(64) if request.seed is None else request.seed,
            acceptance_method=method,
            rules=rules,
            eos_token_ids=() if request.ignore_eos else self.eos_token_ids,
            stop_token_ids=request.stop_token_ids,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            num_speculative_tokens=request.num_speculative_tokens if may_draft else 0,
            num_logprobs=request.logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            logprobs_mode=self._settings.logprobs_mode,
            draft_ahead=request.draft_ahead,
            priority=request.priority,
            request_id=request.request_id or uuid.uuid4().hex,
            cache_salt=request.cache_salt,
            skip_special_tokens=request.skip_special_tokens,
            model_name=self.model_name,
            emitted_token_ids=request.resume.emitted_token_ids if request.resume else (),
            matcher=texts.matcher,
            tells_progress=request.resumable,
        )

    def _check_settings(self, request: GenerationRequest) -> None:
        """Raise ``InvalidRequestError`` for what this coordinator does not offer."""
        for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if value is not None:
                self._check_logprobs(name, value)
        if request.priority and self._settings.scheduling_policy is not SchedulingPolicy.PRIORITY:
            raise InvalidRequestError("priority", "must be 0, since the server's scheduling_policy is fcfs")
        if self.tokenizer is None:
            for name, texts in (("stop", request.stop), ("bad_words", request.bad_words)):
                if texts:
                    raise InvalidRequestError(name, "cannot be used, since the target has no tokenizer")

    def _check_logprobs(self, name: str, value: int) -> None:
        if self._settings.disable_logprobs:
            raise InvalidRequestError(name, "is switched off on this server")
        if value > self._settings.max_logprobs:
            raise InvalidRequestError(
                name, f"is {value}; at most {self._settings.max_logprobs}, the server's setting max_logprobs"
            )

    def _check_model(self, request: GenerationRequest) -> None:
        """Raise ``InvalidRequestError`` if another model began the output that is to be resumed."""
        model = request.resume.model if request.resume else ""
        if model and model != self.model_name:
            raise InvalidRequestError("resume.model", f"is {model!r}, and this server serves {self.model_name!r}")

    def _prompt(self, request: GenerationRequest, rendered: str) -> tuple[int, ...]:
        prompt = request.prompt_token_ids
        if request.chat is not None:
            prompt = self._encode(rendered, adds_special_tokens=bool(request.add_special_tokens), field="messages")
        elif prompt is None:
            prompt = self._encode(request.prompt or "", adds_special_tokens=request.add_special_tokens is not False)
        return prompt

    def _encode(self, text: str, *, adds_special_tokens: bool, field: str = "prompt") -> tuple[int, ...]:
        if self.tokenizer is None:
            raise InvalidRequestError(field, "must be given as prompt_token_ids, since the target has no tokenizer")
        return self.tokenizer.encode_prompt(
            text, limits=self.limits, add_special_tokens=adds_special_tokens, field=field
        )

    def _sampling(self, request: GenerationRequest, bad_words: Runs) -> Work[SamplingParams]:
        """Sampling parameters for the services: bad words as tokens, allowed ids without duplicates, model defaults."""
        allowed: dict[int, None] = {}
        for part in slices_of(request.sampling.allowed_token_ids):
            allowed.update(dict.fromkeys(part))
            if is_long(request.sampling.allowed_token_ids):
                yield
        defaults: dict[str, Any] = {name: self._defaults[name] for name in request.defaulted & self._defaults.keys()}
        yield from checks_of_sampling(replace(request.sampling, allowed_token_ids=(), **defaults))
        changes: dict[str, Any] = {"bad_words": bad_words, "allowed_token_ids": tuple(allowed)}
        return replace(request.sampling, **changes, **defaults)

    @property
    def _defaults(self) -> Mapping[str, float | int]:
        """The model's own defaults of parameters that a request leaves open."""
        return self.text.sampling_defaults if self._settings.generation_config is GenerationConfig.AUTO else {}

    def _bad_words(self, request: GenerationRequest) -> Runs:
        if not request.bad_words or self.tokenizer is None:
            return request.sampling.bad_words
        runs = request.sampling.bad_words + self.tokenizer.encode_bad_words(request.bad_words)
        BAD_WORDS_TOKENS.check("bad_words", sum(map(len, runs)))
        return runs

    def _matcher(self, request: GenerationRequest) -> Matcher | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.grammars is None:
            raise InvalidRequestError(grammar.field, "cannot be used, since the target has no tokenizer")
        if not self.eos_token_ids:
            raise InvalidRequestError(grammar.field, "cannot be used, since the target has no end-of-sequence token")
        return self.grammars.compile(grammar, (*self.eos_token_ids, *request.stop_token_ids))

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """Maximum output that fits the model; ``InvalidRequestError`` if the target's KV cache could never hold it."""
        max_tokens = min(request.max_tokens, self._target.max_model_len - num_prompt_tokens)
        if request.max_tokens == TO_THE_END:
            most = int(self._defaults.get(MAX_NEW_TOKENS, max_tokens))
            max_tokens = max(1, min(max_tokens, most, capacity(self._target) - num_prompt_tokens))
        check_capacity(self._target, num_prompt_tokens, max_tokens)
        return max_tokens


def started(request: GenerationRequest, engine_request: EngineRequest) -> Started:
    """The values that the request left open, for ``Started``."""
    return Started(
        seed=engine_request.seed,
        prompt_token_ids=engine_request.prompt_token_ids if request.prompt_token_ids is None else None,
        max_tokens=engine_request.max_tokens,
        acceptance_method=engine_request.acceptance_method,
        request_id=engine_request.request_id,
        model=engine_request.model_name,
        num_emitted_tokens=len(engine_request.emitted_token_ids),
        sampling={name: getattr(engine_request.sampling, name) for name in DEFAULTABLE if name in request.defaulted},
    )
