"""Names of spans, attributes and exporters.

The names of OpenTelemetry's conventions for generative AI are constants here, because the published package moves and
deprecates them. Other attributes begin with ``outrider.``; their times are in nanoseconds.
"""

from __future__ import annotations

# Exporters, as OTEL_TRACES_EXPORTER names them.
OTLP, NO_EXPORTER = "otlp", "none"

# OpenTelemetry's.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_VERSION = "service.version"
TEXT_COMPLETION = "text_completion"
"""The operation that all requests are."""

# Spans of the coordinator.
TOKENIZE, QUEUE, PREFILL, DECODE, STEP = "tokenize", "queue", "prefill", "decode", "step"
COMPILE_GRAMMAR = "compile grammar"
DRAFT, SCORE, ACCEPT, WIRE = "draft", "score", "accept", "wire"
# Spans of the services, besides QUEUE.
PROPOSE_ITEM, SCORE_ITEM = "draft propose", "target score"
FORWARD, MASK, SAMPLE, WAIT = "forward", "mask", "sample", "wait"
AHEAD = "ahead"

# Ours: a request.
REQUEST_ID = "outrider.request.id"
ACCEPTANCE_METHOD = "outrider.acceptance_method"
NUM_STEPS = "outrider.steps"
NUM_STEPS_NOT_SHOWN = "outrider.steps_not_shown"
NUM_DRAFT_TOKENS = "outrider.draft_tokens"
NUM_ACCEPTED_TOKENS = "outrider.accepted_tokens"
ACCEPTANCE_RATE = "outrider.acceptance_rate"
MEAN_ACCEPTANCE_LENGTH = "outrider.mean_acceptance_length"
NUM_DRAFT_TIMEOUTS = "outrider.draft_timeouts"
NUM_STALE_REPLIES = "outrider.stale_replies"
NUM_DRAFT_LOSSES = "outrider.draft_losses"
NUM_TARGET_LOSSES = "outrider.target_losses"
NUM_BAD_EVIDENCE = "outrider.bad_evidence"

# Ours: a step.
STEP_NUMBER = "outrider.step"
BASE_LENGTH = "outrider.base_length"
DRAFT_LENGTH = "outrider.draft_length"
"""K: the draft tokens that were judged."""
NUM_ACCEPTED = "outrider.accepted"
WAITED_FOR_DRAFT = "outrider.waited_for_draft"
NO_DRAFT_REASON = "outrider.no_draft_reason"
PEER = "outrider.peer"
"""Attribute of ``wire``: the service at its other end, "draft" or "target"."""
IS_PREFILL = "outrider.is_prefill"
IS_LATE = "outrider.is_late"
"""The answer came when its step was over."""
OUTCOME = "outrider.outcome"
"""Outcome of an item: the event that answered it, or why none did."""

# Ours: a service's own time for one item; the first four add up to the last.
QUEUE_NS = "outrider.queue_ns"
FORWARD_NS = "outrider.forward_ns"
SAMPLE_NS = "outrider.sample_ns"
WAIT_NS = "outrider.wait_ns"
TOTAL_NS = "outrider.total_ns"
INTERVAL_NS = "outrider.interval_ns"
"""Time from the coordinator's sending an item to its having the answer."""
WIRE_NS = "outrider.wire_ns"
"""Time on the wire: that, less the service's own time."""

# Ours: a forward.
SESSION = "outrider.session"
GENERATION = "outrider.generation"
BATCH_SIZE = "outrider.batch_size"
NUM_TOKENS = "outrider.tokens"
USED_GRAPH = "outrider.used_graph"
ROLE = "outrider.role"
