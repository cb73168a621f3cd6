"""The draft in process: ``ports.Draft`` over a proposer.

Owns how a draft is put together, with a model or without, and warmed up. Refuses to know transports: ``__main__``
serves it. Imports torch only when there is a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider import __version__
from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.ports import DraftCommand, DraftEvent, Extend, Open, Proposal
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.serving.engine_core import EngineCore
from outrider.serving.local_port import LocalPort
from outrider.serving.session import UNBOUNDED, Limits, SessionLimits
from outrider.serving.session_table import SessionTable
from outrider.serving.token_budget import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_PREFILL_BESIDE, TokenBudget
from outrider.serving.worker import OnFailure
from outrider.types import JudgingRule, ModelDescription, SamplingParams
from outrider_draft.proposers.ngram import LookupJob, NgramProposer
from outrider_draft.settings import check_settings
from outrider_draft.texts import PlainSequence, PlainSequences

if TYPE_CHECKING:
    from outrider.kv_cache import KVSequence
    from outrider.model_executor.cuda_graphs import CaptureProgress
    from outrider.model_executor.loader.weights import Progress
    from outrider.model_executor.model_runner import ModelRunner
    from outrider_draft.proposers.model import ModelProposer, ProposalJob

    ModelCore = EngineCore[KVSequence, Extend, ProposalJob, Proposal]

NgramCore = EngineCore[PlainSequence, Extend, LookupJob, Proposal]

UNLIMITED_LENGTH = 2**31 - 1
"""The longest session of a draft without a model."""


class DraftService(LocalPort[DraftCommand, DraftEvent]):
    """A draft that runs a core, in a thread of its own, until it is closed."""

    def __init__(
        self,
        core: ModelCore | NgramCore,
        description: ModelDescription,
        *,
        runner: ModelRunner | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.runner = runner
        """None for a draft without a model."""
        super().__init__(
            core,
            description,
            rehearsal=_rehearsal(description),
            capture_seconds=0.0 if runner is None else runner.capture_seconds,
            on_failure=on_failure,
            at_end=None if runner is None else runner.close,
            prefix_cache=None if runner is None else runner.sequences.prefix_cache,
        )

    @classmethod
    def load(
        cls,
        settings: DraftSettings,
        *,
        progress: Progress | None = None,
        capture_progress: CaptureProgress | None = None,
        on_failure: OnFailure | None = None,
    ) -> DraftService:
        """Make the draft that the settings ask for; ``ModelError`` or ``ConfigError`` says why it cannot be served.

        ``progress`` counts bytes of weights, ``capture_progress`` CUDA graphs.
        """
        check_settings(settings)
        if settings.method is DraftMethod.NGRAM:
            return cls.with_ngram(
                min_n=settings.prompt_lookup_min,
                max_n=settings.prompt_lookup_max,
                max_model_len=settings.max_model_len or UNLIMITED_LENGTH,
                max_batched_tokens=settings.max_batched_tokens,
                session_limits=_session_limits(settings),
                on_failure=on_failure,
            )
        return _load_model(settings, progress, capture_progress, on_failure)

    @classmethod
    def with_ngram(
        cls,
        *,
        min_n: int,
        max_n: int,
        max_model_len: int = UNLIMITED_LENGTH,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        session_limits: SessionLimits = UNBOUNDED,
        on_failure: OnFailure | None = None,
    ) -> DraftService:
        """A draft that looks up what followed the same words before."""
        description = ModelDescription(
            role="draft",
            model_name="ngram",
            architecture="",
            vocab_size=0,
            num_token_ids=0,
            max_model_len=max_model_len,
            version=__version__,
        )
        core = build_ngram_core(
            min_n=min_n,
            max_n=max_n,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
            session_limits=session_limits,
        )
        return cls(core, description, on_failure=on_failure)

    @classmethod
    def with_model(
        cls,
        proposer: ModelProposer,
        description: ModelDescription,
        *,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
        session_limits: SessionLimits = UNBOUNDED,
        on_failure: OnFailure | None = None,
    ) -> DraftService:
        """A draft that draws from a small model."""
        core = build_model_core(
            proposer,
            max_batched_tokens=max_batched_tokens,
            max_prefill_beside=max_prefill_beside,
            session_limits=session_limits,
        )
        return cls(core, description, runner=proposer.runner, on_failure=on_failure)


def build_model_core(
    proposer: ModelProposer,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    max_prefill_beside: int = DEFAULT_PREFILL_BESIDE,
    session_limits: SessionLimits = UNBOUNDED,
) -> ModelCore:
    """The synchronous part of a draft with a model, for a worker's thread or for a test."""
    runner = proposer.runner
    pool = runner.sequences.pool
    limits = Limits(
        runner.config.vocab_size,
        runner.max_model_len,
        trims=True,
        max_cached_tokens=pool.num_pages * pool.page_size,
        sessions=session_limits,
    )
    return EngineCore(
        SessionTable(runner.sequences, limits),
        proposer,
        TokenBudget(max_batched_tokens, max_prefill_beside),
    )


def build_ngram_core(
    *,
    min_n: int,
    max_n: int,
    max_model_len: int = UNLIMITED_LENGTH,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    session_limits: SessionLimits = UNBOUNDED,
) -> NgramCore:
    """The synchronous part of a draft without a model."""
    limits = Limits(vocab_size=0, max_model_len=max_model_len, trims=True, sessions=session_limits)
    proposer = NgramProposer(min_n=min_n, max_n=max_n)
    return EngineCore(SessionTable(PlainSequences(), limits), proposer, TokenBudget(max_batched_tokens))


def _load_model(
    settings: DraftSettings,
    progress: Progress | None,
    capture_progress: CaptureProgress | None,
    on_failure: OnFailure | None,
) -> DraftService:
    from outrider.model_executor.distributed.runner import open_runner
    from outrider.model_executor.loader.description import describe_model
    from outrider_draft.proposers.model import ModelProposer

    runner = open_runner(settings, progress=progress, on_failure=on_failure)
    description = describe_model(
        "draft", settings.model or "", runner, load_format=settings.load_format, name=settings.served_model_name
    )
    runner.warm_up(capture_progress)
    proposer = ModelProposer(runner)
    return DraftService.with_model(
        proposer,
        description,
        max_batched_tokens=settings.max_batched_tokens,
        max_prefill_beside=settings.max_prefill_beside,
        session_limits=_session_limits(settings),
        on_failure=on_failure,
    )


def _session_limits(settings: DraftSettings) -> SessionLimits:
    return SessionLimits(settings.max_sessions_per_link, settings.session_idle_timeout_s)


def _rehearsal(description: ModelDescription) -> list[DraftCommand]:
    sampled = Open(
        session=0,
        generation=0,
        sampling=SamplingParams(),
        seed=0,
        judging_rule=JudgingRule.REJECTION,
        prompt_length=1,
        max_length=min(4, description.max_model_len),
        num_token_ids=description.num_token_ids or 1,
    )
    greedy = replace(sampled, session=1, judging_rule=JudgingRule.GREEDY, sampling=SamplingParams(temperature=0.0))
    return [sampled, greedy, *(Extend(session, 1, 0, EMPTY_PREFIX, (0,), draft_length=2) for session in (0, 1))]
