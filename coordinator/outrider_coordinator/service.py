"""Coordinator in process: accepts requests, streams their output, and reports statistics.

Connects requests with sessions. ``driver`` runs the sessions, ``services`` owns the links.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

from outrider import __version__
from outrider.config import CoordinatorSettings
from outrider.config.fields import DraftLengthMode
from outrider.cooperative import run_in_slices
from outrider.errors import CapacityError, InvalidRequestError, OutriderError, UnavailableError
from outrider.generation import NOWHERE, Delta, GenerationRequest, ModelInfo, ModelPlacement, TokenizerFiles
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.ports import Draft, DraftCommand, DraftEvent, Target, TargetCommand, TargetEvent
from outrider.readings import Reading
from outrider.structured_output import GrammarCompiler, may_take_long
from outrider.telemetry.tracing import Tracing
from outrider.tokenization import ModelText, read_chat_template
from outrider.types import ModelDescription
from outrider_coordinator.readings import coordinator_readings
from outrider_coordinator.requests.driver import Driver
from outrider_coordinator.requests.input_processor import InputProcessor, started
from outrider_coordinator.requests.request_log import log_refusal
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.dispatch import CommandT, EventT
from outrider_coordinator.routing.replica import Port
from outrider_coordinator.routing.replicas import Fixed, Source
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.speculation.explanation import draft_length_reason
from outrider_coordinator.stats.latency_histograms import LatencyHistograms
from outrider_coordinator.threads import Threads
from outrider_coordinator.tracing import RequestTrace, RequestTraces

TargetSource = Source[TargetCommand, TargetEvent]
DraftSource = Source[DraftCommand, DraftEvent]

_REFUSALS: dict[type[OutriderError], str] = {
    CapacityError: "queue_full",
    InvalidRequestError: "invalid",
    UnavailableError: "unavailable",
}
"""Reasons for which a request is refused, by error."""

LONG_TEXT_CHARACTERS = 20_000
"""Longer texts are tokenized in a thread, so that the event loop keeps serving other streams."""
LONG_OUTPUT_TOKENS = 500
"""Resumed requests with a longer output are detokenized in a thread too."""


class Coordinator:
    """Serves generations from a target and an optional draft. Belongs to one event loop."""

    def __init__(
        self,
        target: Target | TargetSource,
        draft: Draft | DraftSource | None,
        settings: CoordinatorSettings,
        *,
        on_target: Callable[[bool], None] = lambda is_up: None,
        tracing: Tracing | None = None,
    ) -> None:
        """A target or a draft is one port, or a source of replicas; all targets have to be one model.

        ``on_target`` is told when the first target is attached and when the last is lost.
        """
        self._settings = settings
        self._exports_traces = tracing is not None
        self._traces = RequestTraces(tracing, max_steps=settings.max_traced_steps)
        self._text = None if settings.tokenizer is None else ModelText.from_folder(settings.tokenizer)
        """Replaces the target's tokenizer, if set."""
        self._chat_template = None if settings.chat_template is None else read_chat_template(settings.chat_template)
        self._input_processor: InputProcessor | None = None
        self.policy = DraftLengthPolicy(
            settings.num_speculative_tokens,
            disable_by_batch_size=settings.disable_by_batch_size,
            has_draft=draft is not None,
            is_controlled=settings.draft_length is DraftLengthMode.AUTO,
        )
        self.request_manager = RequestManager(
            self.policy, max_running_per_target=settings.max_running_requests, max_queue=settings.max_queue
        )
        self.driver = Driver(
            _source(target),
            None if draft is None else _source(draft),
            self.request_manager,
            settings,
            on_model=self._make_input_processor,
            on_target=on_target,
        )
        self.services = self.driver.services
        self._latency_histograms = LatencyHistograms()
        self._threads = Threads()
        self._slow_threads = Threads(1)
        """Thread of grammars that may take seconds to compile, for which other requests do not wait."""
        self._last_arrival_ns = 0
        self._prefix_hash_key = secrets.token_bytes(16)
        """Key of the prefix hashes of all sessions, so that hashes of their prompts can be compared when they are
        placed."""
        self._refusals: Counter[str] = Counter(dict.fromkeys(_REFUSALS.values(), 0))

    # Lifecycle.

    async def start(self) -> None:
        """Attach to the target, however long that takes, and try the draft once.

        A draft that cannot be reached is tried again and again in the background. Raises ``PairMismatchError`` for a
        draft that does not fit, ``ConfigError`` for a tokenizer that cannot be used.
        """
        await self.services.start()

    async def close(self) -> None:
        """Fail running requests with ``UnavailableError`` and close all links."""
        self.services.stop_waiting()
        self.driver.fail_all(UnavailableError("the coordinator is shutting down"))
        await self.services.close()

    # Requests of users.

    async def generate_stream(
        self,
        request: GenerationRequest,
        *,
        deadline_s: float | None = None,
        on_taken_in: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta, None]:
        """New output as it comes; the last delta carries the result. Closing the iterator cancels the request.

        ``on_taken_in`` is called when the request is tokenized; it is not held from then on.
        """
        trace = self._traces.begin(request)
        try:
            request_state = await self._add_request(request, trace)
        except BaseException as error:
            trace.refused(request, error)
            self._count_refusal(error)
            log_refusal(request.request_id, trace.trace_id, error)
            raise
        if deadline_s is not None:
            self.driver.expire_after(request_state, deadline_s)
        first = started(request, request_state.loop.engine_request) if request.resumable else None
        del request  # a chat takes megabytes, and its stream minutes
        on_taken_in()
        try:
            if first is not None:
                yield Delta("", (), started=first)
            async for delta in request_state.output_collector.deltas():
                yield delta
        finally:
            self.driver.cancel(request_state)

    async def model_info(self) -> ModelInfo:
        """Return facts about the served models."""
        target, draft = self.services.require_target(), self.services.draft
        return ModelInfo(
            target_model=target.model_name,
            draft_model=draft.descriptions[0].model_name if draft and draft.descriptions else "",
            max_model_len=target.max_model_len,
            num_token_ids=target.num_token_ids,
            eos_token_ids=self._require_input_processor().eos_token_ids,
            num_speculative_tokens=self._settings.num_speculative_tokens,
            acceptance_method=self._settings.acceptance_method,
            draft_attached=draft is not None and draft.is_up,
            version=__version__,
            num_running=len(self.request_manager.admission.running),
            num_waiting=len(self.request_manager.admission.waiting),
            target_pages_free=self.services.target.num_pages_free,
            draft_pages_free=draft.num_pages_free if draft else 0,
            draft_length_mode=self._settings.draft_length.value,
            draft_length=round(self.policy.mean_length, 2),
            target_placement=ModelPlacement.of(target),
            draft_placement=ModelPlacement.of(draft.descriptions[0]) if draft and draft.descriptions else NOWHERE,
            tensor_planes=self.services.peers.planes.lines(),
            draft_length_reason=draft_length_reason(self.policy, is_draft_up=draft.is_up) if draft else "",
            exports_traces=self._exports_traces,
        )

    def tokenizer_files(self) -> TokenizerFiles:
        """Files of the tokenizer and chat templates in use; ``UnavailableError`` until a target was attached."""
        return self._require_input_processor().text.files

    @property
    def limits(self) -> ModelLimits:
        """Limits of the target; wide until one was attached."""
        return ANY_MODEL if self._input_processor is None else self._input_processor.limits

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.request_manager.admission.running)

    def readings(self) -> list[Reading]:
        """Figures of this moment, under the names that metrics have; to be called on the coordinator's event loop."""
        grammars = None if self._input_processor is None else self._input_processor.grammars
        return [
            *coordinator_readings(self.request_manager, self.services, self._latency_histograms, self._refusals),
            *([] if grammars is None else grammars.statistics.compile_readings()),
        ]

    def _count_refusal(self, error: BaseException) -> None:
        if not isinstance(error, OutriderError):
            return
        reason = next((reason for kind, reason in _REFUSALS.items() if isinstance(error, kind)), type(error).__name__)
        self._refusals[reason] += 1

    # Input processing.

    async def _add_request(self, request: GenerationRequest, trace: RequestTrace) -> RequestState:
        processor, arrival_ns = self._require_input_processor(), self._next_arrival_ns()
        await run_in_slices(processor.checking(request))
        rendered = await processor.render(request)
        tokenize = partial(processor.tokenize, request, rendered)
        grammar = request.sampling.grammar
        threads = self._slow_threads if grammar is not None and may_take_long(grammar) else self._threads
        texts = await threads.call(tokenize, in_thread=_has_long_text(request, rendered))
        engine_request = replace(
            await run_in_slices(processor.processing(request, texts)),
            arrival_ns=arrival_ns,
            prefix_hash_key=self._prefix_hash_key,
        )
        table = self.request_manager.table
        make_loop = partial(SessionLoop, engine_request, self.policy, tokenizer=processor.tokenizer, table=table)
        loop = await self._threads.call(make_loop, in_thread=len(engine_request.emitted_token_ids) > LONG_OUTPUT_TOKENS)
        await run_in_slices(loop.tokens.prepare())
        self._require_input_processor()  # the target may have been lost meanwhile
        if trace.notes is not None:
            trace.notes.grammar_ns = texts.grammar_ns
            trace.notes.taken_in(processor.model_name)
        request_state = RequestState(loop, self._latency_histograms, trace)
        request_state.request_timings.note_grammar(texts.grammar_ns)
        self.driver.submit(request_state)
        return request_state

    def _next_arrival_ns(self) -> int:
        """Arrival time of a request by the wall clock, so that coordinators agree on which is older."""
        self._last_arrival_ns = max(self._last_arrival_ns + 1, time.time_ns())
        return self._last_arrival_ns

    def _require_input_processor(self) -> InputProcessor:
        if self._input_processor is None or self.services.has_given_up:
            raise UnavailableError("the target cannot be reached")
        return self._input_processor

    def _make_input_processor(self, target: ModelDescription) -> None:
        """The tokenizer is that of the first target; limits are those of the attached target with the most room."""
        if self._input_processor is not None:
            text, grammars = self._input_processor.text, self._input_processor.grammars
        else:
            grammars = GrammarCompiler.of(target, tries_first=True)
            if grammars is not None:
                grammars.warm_up()  # with the interpreter lock, so not beside streams
            text = ModelText.from_files(target.tokenizer_files, bos_token_id=target.bos_token_id)
            if self._text is not None:
                text = replace(self._text, sampling_defaults=text.sampling_defaults)
            if self._chat_template is not None:
                text = text.with_chat_template(self._chat_template)
        self._input_processor = InputProcessor(self._settings, target, text, grammars)


def _has_long_text(request: GenerationRequest, rendered: str) -> bool:
    """True if tokenizing a request with its ``rendered`` chat, or compiling its grammar, may take tens of
    milliseconds.
    """
    if request.sampling.grammar is not None:
        return True
    return len(request.prompt or rendered) + sum(map(len, request.bad_words)) > LONG_TEXT_CHARACTERS


def _source(found: Port[CommandT, EventT] | Source[CommandT, EventT]) -> Source[CommandT, EventT]:
    return found if isinstance(found, Source) else Fixed(found)
