"""The target in process: ``ports.Target`` over one loaded model.

Owns how a target is put together and warmed up. Refuses to know transports: ``__main__`` serves it.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.boot_id import channel_host
from outrider.config import TargetSettings
from outrider.config.schema.model_service import max_batched_tokens as tokens_of_a_forward
from outrider.kv_cache import KVSequence
from outrider.model_executor.cost_profile import profile_target
from outrider.model_executor.cuda_graphs import CaptureProgress
from outrider.model_executor.device_lock import device_lock
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.loader.weights import Progress
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Open, Score, TargetCommand, TargetEvent
from outrider.ports import Scores as ScoresEvent
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.readings import Reading
from outrider.serving.engine_core import EngineCore
from outrider.serving.in_process.engine_thread import OnFailure
from outrider.serving.in_process.service import InProcessService
from outrider.serving.session import UNBOUNDED, Limits, SessionLimits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_MIXED_PREFILL_TOKENS, TokenBudget
from outrider.structured_output import GrammarCompiler
from outrider.types import JudgingRule, ModelDescription, SamplingParams, StepCost
from outrider_target.executor import TargetExecutor
from outrider_target.jobs import ScoreJob
from outrider_target.planes import TargetPlanes

TargetCore = EngineCore[KVSequence, Score, ScoreJob, ScoresEvent]


class TargetService(InProcessService[TargetCommand, TargetEvent]):
    """A target that runs ``runner``, in a thread of its own, until it is closed."""

    def __init__(
        self,
        runner: ModelRunner,
        description: ModelDescription,
        *,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS,
        computes_ahead: bool = True,
        session_limits: SessionLimits = UNBOUNDED,
        planes: TargetPlanes | None = None,
        on_failure: OnFailure | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """``planes`` take hidden states to drafts; None: they go inline."""
        self.runner = runner
        runner.sampler.use_grammars(GrammarCompiler.of(description))
        core = build_core(
            runner,
            max_batched_tokens=max_batched_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            computes_ahead=computes_ahead,
            session_limits=session_limits,
            planes=planes,
        )
        super().__init__(
            core,
            replace(description, channel_host=channel_host()),
            warm_up_commands=_warm_up_commands(description),
            capture_seconds=runner.worker.capture_seconds,
            on_failure=on_failure,
            on_closed=runner.close,
            prefix_cache=runner.sequences.prefix_cache,
            planes=planes,
            channels=ProposalReceiver(),
            hang_timeout_s=hang_timeout_s,
        )

    def readings(self) -> list[Reading]:
        """Figures of this moment; from any thread."""
        grammars = self.runner.sampler.grammars
        return [*super().readings(), *([] if grammars is None else grammars.statistics.mask_readings())]

    @classmethod
    def load(
        cls,
        settings: TargetSettings,
        *,
        progress: Progress | None = None,
        capture_progress: CaptureProgress | None = None,
        on_failure: OnFailure | None = None,
    ) -> TargetService:
        """Load the model that the settings name; ``ModelError`` or ``ConfigError`` says why it cannot be served.

        ``progress`` counts bytes of weights, ``capture_progress`` CUDA graphs.
        """
        runner = open_runner(settings, progress=progress, on_failure=on_failure)
        description = describe_model(
            "target", settings.model, runner, load_format=settings.load_format, name=settings.served_model_name
        )
        with device_lock(description.device_id, is_shared=True):
            runner.warm_up(capture_progress)
            runner.sampler.warm_up(runner.config.vocab_size, runner.dtype, runner.device)
        kinds = settings.tensor_plane.kinds(
            is_gpu=runner.device.type == "cuda", is_encrypted=bool(settings.tls_cert_file)
        )
        return cls(
            runner,
            replace(
                description, plane_kinds=tuple(map(str, kinds)), step_costs=_step_costs(runner, settings, description)
            ),
            max_batched_tokens=tokens_of_a_forward(settings.max_batched_tokens, is_gpu=runner.worker.is_on_gpu),
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            computes_ahead=settings.compute_ahead,
            session_limits=SessionLimits(settings.max_sessions_per_link, settings.session_idle_timeout_s),
            planes=TargetPlanes(runner.device, kinds, host=settings.host),
            on_failure=on_failure,
            hang_timeout_s=settings.hang_timeout_s,
        )


def _step_costs(runner: ModelRunner, settings: TargetSettings, description: ModelDescription) -> tuple[StepCost, ...]:
    if not settings.cost_profile_s:
        return ()
    with device_lock(description.device_id):
        return profile_target(
            runner,
            max_rows=settings.max_running_requests,
            max_length=settings.num_speculative_tokens,
            bound_s=settings.cost_profile_s,
        )


def build_core(
    runner: ModelRunner,
    *,
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS,
    computes_ahead: bool = True,
    session_limits: SessionLimits = UNBOUNDED,
    planes: TargetPlanes | None = None,
) -> TargetCore:
    """The synchronous part, for a worker's thread or for a test."""
    pool = runner.sequences.pool
    limits = Limits(
        runner.config.vocab_size,
        runner.max_model_len,
        trims=False,
        max_cached_tokens=pool.num_pages * pool.page_size,
        sessions=session_limits,
    )
    return EngineCore(
        SessionRegistry(runner.sequences, limits),
        TargetExecutor(runner, planes),
        TokenBudget(max_batched_tokens, max_mixed_prefill_tokens, adapts_chunks=runner.device.type == "cuda"),
        lookahead=computes_ahead,
    )


def _warm_up_commands(description: ModelDescription) -> list[TargetCommand]:
    sampled = Open(
        session=0,
        generation=0,
        sampling=SamplingParams(),
        seed=0,
        judging_rule=JudgingRule.REJECTION,
        prompt_length=1,
        max_length=1,
        num_token_ids=description.num_token_ids,
    )
    greedy = replace(sampled, session=1, judging_rule=JudgingRule.GREEDY, sampling=SamplingParams(temperature=0.0))
    scores = [Score(session, 1, 0, EMPTY_PREFIX, (0,)) for session in (0, 1)]
    return [sampled, greedy, *scores]
