from outrider.v1 import channel_pb2 as _channel_pb2
from outrider.v1 import sampling_pb2 as _sampling_pb2
from outrider.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JudgingRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JUDGING_RULE_UNSPECIFIED: _ClassVar[JudgingRule]
    JUDGING_RULE_GREEDY: _ClassVar[JudgingRule]
    JUDGING_RULE_COUPLED: _ClassVar[JudgingRule]
    JUDGING_RULE_REJECTION: _ClassVar[JudgingRule]
    JUDGING_RULE_TYPICAL: _ClassVar[JudgingRule]

class AnswerForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANSWER_FORM_TOKENS: _ClassVar[AnswerForm]
    ANSWER_FORM_SPARSE: _ClassVar[AnswerForm]
    ANSWER_FORM_TYPICAL: _ClassVar[AnswerForm]
JUDGING_RULE_UNSPECIFIED: JudgingRule
JUDGING_RULE_GREEDY: JudgingRule
JUDGING_RULE_COUPLED: JudgingRule
JUDGING_RULE_REJECTION: JudgingRule
JUDGING_RULE_TYPICAL: JudgingRule
ANSWER_FORM_TOKENS: AnswerForm
ANSWER_FORM_SPARSE: AnswerForm
ANSWER_FORM_TYPICAL: AnswerForm

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("role", "model_name", "architecture", "vocab_size", "num_token_ids", "max_model_len", "eos_token_ids", "dtype", "device", "page_size", "num_pages", "tokenizer_files", "tokenizer_hash", "acceptance_methods", "version", "tensor_parallel_size", "device_id", "device_name", "bos_token_id", "heartbeat_interval_ms", "hidden_size", "num_layers", "hidden_state_layers", "plane_kinds", "channel_host", "longest_prefill", "step_costs", "quantization", "batch_invariant")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FILES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_METHODS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANE_KINDS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_HOST_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PREFILL_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    role: str
    model_name: str
    architecture: str
    vocab_size: int
    num_token_ids: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    device: str
    page_size: int
    num_pages: int
    tokenizer_files: _containers.RepeatedCompositeFieldContainer[TokenizerFile]
    tokenizer_hash: str
    acceptance_methods: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceMethod]
    version: str
    tensor_parallel_size: int
    device_id: str
    device_name: str
    bos_token_id: int
    heartbeat_interval_ms: int
    hidden_size: int
    num_layers: int
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    plane_kinds: _containers.RepeatedScalarFieldContainer[str]
    channel_host: str
    longest_prefill: int
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    quantization: str
    batch_invariant: bool
    def __init__(self, role: _Optional[str] = ..., model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_token_ids: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., tokenizer_files: _Optional[_Iterable[_Union[TokenizerFile, _Mapping]]] = ..., tokenizer_hash: _Optional[str] = ..., acceptance_methods: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceMethod, str]]] = ..., version: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., device_id: _Optional[str] = ..., device_name: _Optional[str] = ..., bos_token_id: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., plane_kinds: _Optional[_Iterable[str]] = ..., channel_host: _Optional[str] = ..., longest_prefill: _Optional[int] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., quantization: _Optional[str] = ..., batch_invariant: bool = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("num_rows", "num_tokens", "context_length", "duration_ns")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_tokens: int
    context_length: int
    duration_ns: int
    def __init__(self, num_rows: _Optional[int] = ..., num_tokens: _Optional[int] = ..., context_length: _Optional[int] = ..., duration_ns: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("num_received_messages", "num_pages_free", "stall_ms", "stall_limit_ms")
    NUM_RECEIVED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    num_received_messages: int
    num_pages_free: int
    stall_ms: int
    stall_limit_ms: int
    def __init__(self, num_received_messages: _Optional[int] = ..., num_pages_free: _Optional[int] = ..., stall_ms: _Optional[int] = ..., stall_limit_ms: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "generation", "sampling", "seed", "judging_rule", "prompt_length", "max_length", "eos_token_ids", "num_token_ids", "num_logprobs", "num_prompt_logprobs", "logprobs_mode", "banned_token_ids", "request_id", "trace_id", "cache_salt", "prefix_hash_key", "arrival_ns", "hidden_state_layers", "in_turn")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    JUDGING_RULE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_KEY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    IN_TURN_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    sampling: _sampling_pb2.SamplingParams
    seed: int
    judging_rule: JudgingRule
    prompt_length: int
    max_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_token_ids: int
    num_logprobs: int
    num_prompt_logprobs: int
    logprobs_mode: _sampling_pb2.LogprobsMode
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    trace_id: str
    cache_salt: str
    prefix_hash_key: bytes
    arrival_ns: int
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    in_turn: bool
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., judging_rule: _Optional[_Union[JudgingRule, str]] = ..., prompt_length: _Optional[int] = ..., max_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_token_ids: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., logprobs_mode: _Optional[_Union[_sampling_pb2.LogprobsMode, str]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., prefix_hash_key: _Optional[bytes] = ..., arrival_ns: _Optional[int] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., in_turn: bool = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("session", "generation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class HiddenStates(_message.Message):
    __slots__ = ("start", "values", "references")
    START_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    start: int
    values: _tensor_pb2.Tensor
    references: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorPlaneReference]
    def __init__(self, start: _Optional[int] = ..., values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., references: _Optional[_Iterable[_Union[_tensor_pb2.TensorPlaneReference, _Mapping]]] = ...) -> None: ...

class HiddenStateChunk(_message.Message):
    __slots__ = ("session", "generation", "states")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    states: HiddenStates
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., states: _Optional[_Union[HiddenStates, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("session", "generation", "num_steps")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    num_steps: int
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., num_steps: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "generation", "num_cached_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    num_cached_tokens: int
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("session", "generation", "retry_after_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    retry_after_ms: int
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SessionLost(_message.Message):
    __slots__ = ("session", "generation", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    reason: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SessionFailed(_message.Message):
    __slots__ = ("session", "generation", "code", "message", "field")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    code: str
    message: str
    field: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("session", "generation", "retry_after_ms", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    retry_after_ms: int
    reason: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ForwardReport(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "sample_ns", "total_ns", "batch_size", "num_tokens", "num_pages_free", "ended_ns", "num_other_rows", "num_other_drafts")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    sample_ns: int
    total_ns: int
    batch_size: int
    num_tokens: int
    num_pages_free: int
    ended_ns: int
    num_other_rows: int
    num_other_drafts: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., batch_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_pages_free: _Optional[int] = ..., ended_ns: _Optional[int] = ..., num_other_rows: _Optional[int] = ..., num_other_drafts: _Optional[int] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("open", "steps", "release", "plane_offer", "plane_close", "channel_offer", "channel_close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PLANE_OFFER_FIELD_NUMBER: _ClassVar[int]
    PLANE_CLOSE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_OFFER_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    steps: StepCommands
    release: Release
    plane_offer: _tensor_pb2.TensorPlaneOffer
    plane_close: _tensor_pb2.TensorPlaneClose
    channel_offer: _channel_pb2.ProposalChannelOffer
    channel_close: _channel_pb2.ProposalChannelClose
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., steps: _Optional[_Union[StepCommands, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., plane_offer: _Optional[_Union[_tensor_pb2.TensorPlaneOffer, _Mapping]] = ..., plane_close: _Optional[_Union[_tensor_pb2.TensorPlaneClose, _Mapping]] = ..., channel_offer: _Optional[_Union[_channel_pb2.ProposalChannelOffer, _Mapping]] = ..., channel_close: _Optional[_Union[_channel_pb2.ProposalChannelClose, _Mapping]] = ...) -> None: ...

class DraftCommands(_message.Message):
    __slots__ = ("commands", "heartbeat")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    heartbeat: Heartbeat
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("answers", "session_lost", "session_failed", "refused", "opened", "preempted", "plane_chosen", "channel_state")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LOST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PLANE_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_STATE_FIELD_NUMBER: _ClassVar[int]
    answers: StepAnswers
    session_lost: SessionLost
    session_failed: SessionFailed
    refused: Refused
    opened: Opened
    preempted: Preempted
    plane_chosen: _tensor_pb2.TensorPlaneChosen
    channel_state: _channel_pb2.ProposalChannelState
    def __init__(self, answers: _Optional[_Union[StepAnswers, _Mapping]] = ..., session_lost: _Optional[_Union[SessionLost, _Mapping]] = ..., session_failed: _Optional[_Union[SessionFailed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., plane_chosen: _Optional[_Union[_tensor_pb2.TensorPlaneChosen, _Mapping]] = ..., channel_state: _Optional[_Union[_channel_pb2.ProposalChannelState, _Mapping]] = ...) -> None: ...

class DraftEvents(_message.Message):
    __slots__ = ("events", "report", "heartbeat")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    report: ForwardReport
    heartbeat: Heartbeat
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ..., report: _Optional[_Union[ForwardReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("open", "steps", "release", "prepare", "plane_request", "plane_close", "channel_request", "channel_close", "score_ahead")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PLANE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLANE_CLOSE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_CLOSE_FIELD_NUMBER: _ClassVar[int]
    SCORE_AHEAD_FIELD_NUMBER: _ClassVar[int]
    open: Open
    steps: StepCommands
    release: Release
    prepare: Prepare
    plane_request: _tensor_pb2.TensorPlaneRequest
    plane_close: _tensor_pb2.TensorPlaneClose
    channel_request: _channel_pb2.ProposalChannelRequest
    channel_close: _channel_pb2.ProposalChannelClose
    score_ahead: ScoreAhead
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., steps: _Optional[_Union[StepCommands, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., plane_request: _Optional[_Union[_tensor_pb2.TensorPlaneRequest, _Mapping]] = ..., plane_close: _Optional[_Union[_tensor_pb2.TensorPlaneClose, _Mapping]] = ..., channel_request: _Optional[_Union[_channel_pb2.ProposalChannelRequest, _Mapping]] = ..., channel_close: _Optional[_Union[_channel_pb2.ProposalChannelClose, _Mapping]] = ..., score_ahead: _Optional[_Union[ScoreAhead, _Mapping]] = ...) -> None: ...

class TargetCommands(_message.Message):
    __slots__ = ("commands", "heartbeat")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    heartbeat: Heartbeat
    def __init__(self, commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("answers", "session_lost", "session_failed", "refused", "opened", "preempted", "hidden_states", "plane_offer", "plane_chosen", "channel_offer", "channel_state")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LOST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    PLANE_OFFER_FIELD_NUMBER: _ClassVar[int]
    PLANE_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_OFFER_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_STATE_FIELD_NUMBER: _ClassVar[int]
    answers: StepAnswers
    session_lost: SessionLost
    session_failed: SessionFailed
    refused: Refused
    opened: Opened
    preempted: Preempted
    hidden_states: HiddenStateChunk
    plane_offer: _tensor_pb2.TensorPlaneOffer
    plane_chosen: _tensor_pb2.TensorPlaneChosen
    channel_offer: _channel_pb2.ProposalChannelOffer
    channel_state: _channel_pb2.ProposalChannelState
    def __init__(self, answers: _Optional[_Union[StepAnswers, _Mapping]] = ..., session_lost: _Optional[_Union[SessionLost, _Mapping]] = ..., session_failed: _Optional[_Union[SessionFailed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStateChunk, _Mapping]] = ..., plane_offer: _Optional[_Union[_tensor_pb2.TensorPlaneOffer, _Mapping]] = ..., plane_chosen: _Optional[_Union[_tensor_pb2.TensorPlaneChosen, _Mapping]] = ..., channel_offer: _Optional[_Union[_channel_pb2.ProposalChannelOffer, _Mapping]] = ..., channel_state: _Optional[_Union[_channel_pb2.ProposalChannelState, _Mapping]] = ...) -> None: ...

class TargetEvents(_message.Message):
    __slots__ = ("events", "report", "heartbeat")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    report: ForwardReport
    heartbeat: Heartbeat
    def __init__(self, events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ..., report: _Optional[_Union[ForwardReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class StateBatch(_message.Message):
    __slots__ = ("plane_id", "dtype", "width", "starts", "counts", "offsets_bytes", "sequences")
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    plane_id: bytes
    dtype: str
    width: int
    starts: bytes
    counts: bytes
    offsets_bytes: bytes
    sequences: bytes
    def __init__(self, plane_id: _Optional[bytes] = ..., dtype: _Optional[str] = ..., width: _Optional[int] = ..., starts: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., offsets_bytes: _Optional[bytes] = ..., sequences: _Optional[bytes] = ...) -> None: ...

class StepCommands(_message.Message):
    __slots__ = ("sessions", "generations", "num_kept_tokens", "prefix_chains", "hash_tails", "counts", "token_ids", "draft_lengths", "draft_token_ids", "support_counts", "support_token_ids", "states", "hidden_states_from", "plane", "channel", "trace_parents", "hidden_states")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CHAINS_FIELD_NUMBER: _ClassVar[int]
    HASH_TAILS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FROM_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    sessions: bytes
    generations: bytes
    num_kept_tokens: bytes
    prefix_chains: bytes
    hash_tails: bytes
    counts: bytes
    token_ids: bytes
    draft_lengths: bytes
    draft_token_ids: bytes
    support_counts: bytes
    support_token_ids: bytes
    states: StateBatch
    hidden_states_from: bytes
    plane: int
    channel: int
    trace_parents: _containers.RepeatedScalarFieldContainer[str]
    hidden_states: _containers.RepeatedCompositeFieldContainer[HiddenStates]
    def __init__(self, sessions: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., num_kept_tokens: _Optional[bytes] = ..., prefix_chains: _Optional[bytes] = ..., hash_tails: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., draft_lengths: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., support_counts: _Optional[bytes] = ..., support_token_ids: _Optional[bytes] = ..., states: _Optional[_Union[StateBatch, _Mapping]] = ..., hidden_states_from: _Optional[bytes] = ..., plane: _Optional[int] = ..., channel: _Optional[int] = ..., trace_parents: _Optional[_Iterable[str]] = ..., hidden_states: _Optional[_Iterable[_Union[HiddenStates, _Mapping]]] = ...) -> None: ...

class ScoreAhead(_message.Message):
    __slots__ = ("batched", "channel", "proposal_generations")
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    batched: StepCommands
    channel: int
    proposal_generations: bytes
    def __init__(self, batched: _Optional[_Union[StepCommands, _Mapping]] = ..., channel: _Optional[int] = ..., proposal_generations: _Optional[bytes] = ...) -> None: ...

class StepAnswers(_message.Message):
    __slots__ = ("sessions", "generations", "base_lengths", "counts", "token_ids", "outside_mass", "support_counts", "support_token_ids", "support_sizes", "support_probs", "states", "channel", "draft_token_ids", "form", "timings_ns", "details", "goes_on")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_MASS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZES_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_PROBS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_NS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    sessions: bytes
    generations: bytes
    base_lengths: bytes
    counts: bytes
    token_ids: bytes
    outside_mass: bytes
    support_counts: bytes
    support_token_ids: bytes
    support_sizes: bytes
    support_probs: bytes
    states: StateBatch
    channel: int
    draft_token_ids: bytes
    form: AnswerForm
    timings_ns: bytes
    details: AnswerDetails
    goes_on: bytes
    def __init__(self, sessions: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., base_lengths: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., outside_mass: _Optional[bytes] = ..., support_counts: _Optional[bytes] = ..., support_token_ids: _Optional[bytes] = ..., support_sizes: _Optional[bytes] = ..., support_probs: _Optional[bytes] = ..., states: _Optional[_Union[StateBatch, _Mapping]] = ..., channel: _Optional[int] = ..., draft_token_ids: _Optional[bytes] = ..., form: _Optional[_Union[AnswerForm, str]] = ..., timings_ns: _Optional[bytes] = ..., details: _Optional[_Union[AnswerDetails, _Mapping]] = ..., goes_on: _Optional[bytes] = ...) -> None: ...

class AnswerDetails(_message.Message):
    __slots__ = ("draft_token_probs", "entropies", "logprobs", "prompt_logprobs", "hidden_states")
    DRAFT_TOKEN_PROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    draft_token_probs: bytes
    entropies: bytes
    logprobs: CandidateBatch
    prompt_logprobs: CandidateBatch
    hidden_states: _containers.RepeatedCompositeFieldContainer[HiddenStates]
    def __init__(self, draft_token_probs: _Optional[bytes] = ..., entropies: _Optional[bytes] = ..., logprobs: _Optional[_Union[CandidateBatch, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[CandidateBatch, _Mapping]] = ..., hidden_states: _Optional[_Iterable[_Union[HiddenStates, _Mapping]]] = ...) -> None: ...

class CandidateBatch(_message.Message):
    __slots__ = ("num_positions", "counts", "token_ids", "logprobs", "ranks", "top_counts", "top_token_ids", "top_logprobs")
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_positions: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_positions: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...
