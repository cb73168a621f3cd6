"""The draft in process: ``ports.Draft`` over a proposer.

Owns how a draft is put together and warmed up; what it proposes with is ``proposers.registry``'s. ``__main__`` serves
it. Imports torch only when there is a model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.boot_id import channel_host
from outrider.config import DraftSettings
from outrider.config.schema.model_service import max_batched_tokens as tokens_of_a_forward
from outrider.ports import DraftCommand, DraftEvent, Extend, Open, Proposal
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.proposal_channel.sender import ProposalSender
from outrider.readings import Reading
from outrider.serving.engine_core import EngineCore
from outrider.serving.in_process.engine_thread import OnFailure
from outrider.serving.in_process.plane_host import NoPlanes
from outrider.serving.in_process.service import InProcessService
from outrider.serving.session import UNBOUNDED, Limits, SessionLimits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_MIXED_PREFILL_TOKENS, TokenBudget
from outrider.transport.channel_streams import call_target
from outrider.transport.security import link_security
from outrider.types import JudgingRule, ModelDescription, SamplingParams
from outrider_draft.proposers.base import UNLIMITED_LENGTH
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, check_settings, load_proposer, without_kv
from outrider_draft.proposers.text.ngram import NgramProposer

if TYPE_CHECKING:
    from outrider.model_executor.cuda_graphs import CaptureProgress
    from outrider.model_executor.loader.weights import Progress
    from outrider_draft.planes import DraftPlanes
    from outrider_draft.proposers.draft_model import ModelProposer

DraftCore = EngineCore[Any, Extend, Any, Proposal]


class DraftService(InProcessService[DraftCommand, DraftEvent]):
    """A draft that runs a proposer, in a thread of its own, until it is closed."""

    def __init__(
        self,
        served: ServedProposer,
        *,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS,
        session_limits: SessionLimits = UNBOUNDED,
        planes: DraftPlanes | None = None,
        channels: ProposalSender | None = None,
        on_failure: OnFailure | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """``planes`` bring hidden states; None: they come inline, or are not read. ``channels`` to targets; None:
        within this host.
        """
        self.runner = runner = served.runner
        """None for a draft without a model."""
        core = build_core(
            served,
            max_batched_tokens=max_batched_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            session_limits=session_limits,
            planes=planes,
        )
        kinds = served.description.plane_kinds if planes is None else planes.kinds
        super().__init__(
            core,
            replace(served.description, plane_kinds=kinds, channel_host=channel_host()),
            warm_up_commands=_warm_up_commands(served.description),
            capture_seconds=0.0 if runner is None else runner.worker.capture_seconds,
            on_failure=on_failure,
            on_closed=served.close,
            prefix_cache=served.prefix_cache if runner is None else runner.sequences.prefix_cache,
            planes=planes or NoPlanes(Reading("outrider_stale_references_total", 0)),
            channels=channels or ProposalSender(),
            hang_timeout_s=hang_timeout_s,
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
        served = load_proposer(settings, LoadHooks(progress, capture_progress, on_failure))
        is_gpu = served.runner is not None and served.runner.worker.is_on_gpu
        return cls(
            served,
            max_batched_tokens=tokens_of_a_forward(settings.max_batched_tokens, is_gpu=is_gpu),
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            session_limits=SessionLimits(settings.max_sessions_per_link, settings.session_idle_timeout_s),
            planes=_open_planes(settings) if served.description.hidden_state_layers else None,
            channels=ProposalSender(partial(call_target, link_security(settings))),
            on_failure=on_failure,
            hang_timeout_s=settings.hang_timeout_s,
        )

    @classmethod
    def with_ngram(
        cls,
        *,
        min_n: int,
        max_n: int,
        max_model_len: int = UNLIMITED_LENGTH,
        session_limits: SessionLimits = UNBOUNDED,
        on_failure: OnFailure | None = None,
    ) -> DraftService:
        """A draft that looks up what followed the same words before."""
        served = without_kv(NgramProposer(min_n=min_n, max_n=max_n, max_model_len=max_model_len), name="ngram")
        return cls(served, session_limits=session_limits, on_failure=on_failure)


def build_core(
    served: ServedProposer,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS,
    session_limits: SessionLimits = UNBOUNDED,
    planes: DraftPlanes | None = None,
) -> DraftCore:
    """The synchronous part of a draft, for a worker's thread or for a test."""
    limits = Limits(
        served.description.vocab_size,
        served.description.max_model_len,
        trims=True,
        max_cached_tokens=served.max_cached_tokens,
        sessions=session_limits,
    )
    budget = TokenBudget(max_batched_tokens, max_mixed_prefill_tokens)
    return EngineCore(SessionRegistry(served.sequences, limits), served.executor, budget, references=planes)


def _open_planes(settings: DraftSettings) -> DraftPlanes:
    """Planes of the device where the proposer's tensors are; torch is loaded by then."""
    import torch

    from outrider.model_executor.device_setup import resolve_device
    from outrider_draft.planes import DraftPlanes

    return DraftPlanes(torch.device(resolve_device(settings.device)))


def build_model_core(
    proposer: ModelProposer,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS,
) -> DraftCore:
    """The synchronous part of a draft with a model, for a test."""
    from outrider_draft.proposers.draft_model import serve_model

    runner = proposer.runner
    facts = ModelDescription("draft", "", "", runner.config.vocab_size, runner.config.vocab_size, runner.max_model_len)
    served = serve_model(proposer, facts)
    return build_core(served, max_batched_tokens=max_batched_tokens, max_mixed_prefill_tokens=max_mixed_prefill_tokens)


def build_ngram_core(
    *,
    min_n: int,
    max_n: int,
    max_model_len: int = UNLIMITED_LENGTH,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
) -> DraftCore:
    """The synchronous part of a draft that looks up, for a test."""
    proposer = NgramProposer(min_n=min_n, max_n=max_n, max_model_len=max_model_len)
    return build_core(without_kv(proposer, name="ngram"), max_batched_tokens=max_batched_tokens)


def _warm_up_commands(description: ModelDescription) -> list[DraftCommand]:
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
