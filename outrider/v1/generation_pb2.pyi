from outrider.v1 import chat_pb2 as _chat_pb2
from outrider.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_text", "prompt_token_ids", "packed_prompt_token_ids", "chat", "max_tokens", "sampling", "bad_words", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "prompt_logprobs", "num_speculative_tokens", "acceptance_method", "draft_ahead", "priority", "request_id", "cache_salt", "resumable", "resume", "add_special_tokens", "skip_special_tokens")
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PACKED_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_text: str
    prompt_token_ids: _sampling_pb2.TokenSequence
    packed_prompt_token_ids: bytes
    chat: _chat_pb2.Chat
    max_tokens: int
    sampling: _sampling_pb2.SamplingParams
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    prompt_logprobs: int
    num_speculative_tokens: int
    acceptance_method: _sampling_pb2.AcceptanceMethod
    draft_ahead: bool
    priority: int
    request_id: str
    cache_salt: str
    resumable: bool
    resume: Resumption
    add_special_tokens: bool
    skip_special_tokens: bool
    def __init__(self, prompt_text: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[_sampling_pb2.TokenSequence, _Mapping]] = ..., packed_prompt_token_ids: _Optional[bytes] = ..., chat: _Optional[_Union[_chat_pb2.Chat, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., include_stop_str_in_output: bool = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., acceptance_method: _Optional[_Union[_sampling_pb2.AcceptanceMethod, str]] = ..., draft_ahead: bool = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., resumable: bool = ..., resume: _Optional[_Union[Resumption, _Mapping]] = ..., add_special_tokens: bool = ..., skip_special_tokens: bool = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("emitted_token_ids", "model")
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, emitted_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "acceptance_histogram", "mean_acceptance_length", "num_judged_tokens", "num_forced_tokens", "num_accepted_forced_tokens")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_JUDGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    mean_acceptance_length: float
    num_judged_tokens: int
    num_forced_tokens: int
    num_accepted_forced_tokens: int
    def __init__(self, num_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., mean_acceptance_length: _Optional[float] = ..., num_judged_tokens: _Optional[int] = ..., num_forced_tokens: _Optional[int] = ..., num_accepted_forced_tokens: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("draft_s", "target_s", "accept_s", "wire_s")
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    draft_s: float
    target_s: float
    accept_s: float
    wire_s: float
    def __init__(self, draft_s: _Optional[float] = ..., target_s: _Optional[float] = ..., accept_s: _Optional[float] = ..., wire_s: _Optional[float] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "first_token_s", "total_s", "draft_s", "target_s", "accept_s", "wire_s", "paused_s", "prefill", "num_drafts_ahead", "grammar_s", "mask_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_S_FIELD_NUMBER: _ClassVar[int]
    MASK_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    first_token_s: float
    total_s: float
    draft_s: float
    target_s: float
    accept_s: float
    wire_s: float
    paused_s: float
    prefill: StageTimes
    num_drafts_ahead: int
    grammar_s: float
    mask_s: float
    def __init__(self, queue_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., target_s: _Optional[float] = ..., accept_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., prefill: _Optional[_Union[StageTimes, _Mapping]] = ..., num_drafts_ahead: _Optional[int] = ..., grammar_s: _Optional[float] = ..., mask_s: _Optional[float] = ...) -> None: ...

class GenerationResult(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "matched_stop_token_id", "matched_stop_text", "logprobs", "prompt_logprobs", "usage", "speculation", "seed", "request_id", "timing", "has_logprobs", "has_prompt_logprobs", "trace_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    matched_stop_token_id: int
    matched_stop_text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    usage: Usage
    speculation: SpeculationStats
    seed: int
    request_id: str
    timing: Timing
    has_logprobs: bool
    has_prompt_logprobs: bool
    trace_id: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., matched_stop_text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., has_logprobs: bool = ..., has_prompt_logprobs: bool = ..., trace_id: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("seed", "prompt_token_ids", "max_tokens", "acceptance_method", "request_id", "model", "num_emitted_tokens", "sampling")
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    seed: int
    prompt_token_ids: _sampling_pb2.TokenSequence
    max_tokens: int
    acceptance_method: _sampling_pb2.AcceptanceMethod
    request_id: str
    model: str
    num_emitted_tokens: int
    sampling: _sampling_pb2.SamplingParams
    def __init__(self, seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Union[_sampling_pb2.TokenSequence, _Mapping]] = ..., max_tokens: _Optional[int] = ..., acceptance_method: _Optional[_Union[_sampling_pb2.AcceptanceMethod, str]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., num_emitted_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("speculation", "timing")
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    speculation: SpeculationStats
    timing: Timing
    def __init__(self, speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "has_logprobs", "progress")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    has_logprobs: bool
    progress: Progress
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., has_logprobs: bool = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("delta", "result", "started")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    result: GenerationResult
    started: Started
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ..., result: _Optional[_Union[GenerationResult, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: GenerationResult
    def __init__(self, result: _Optional[_Union[GenerationResult, _Mapping]] = ...) -> None: ...

class ModelPlacement(_message.Message):
    __slots__ = ("device", "device_name", "tensor_parallel_size", "dtype", "page_size", "num_pages", "quantization", "batch_invariant")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    device: str
    device_name: str
    tensor_parallel_size: int
    dtype: str
    page_size: int
    num_pages: int
    quantization: str
    batch_invariant: bool
    def __init__(self, device: _Optional[str] = ..., device_name: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., quantization: _Optional[str] = ..., batch_invariant: bool = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target_model", "draft_model", "max_model_len", "num_token_ids", "eos_token_ids", "num_speculative_tokens", "acceptance_method", "draft_attached", "version", "num_running", "num_waiting", "target_pages_free", "draft_pages_free", "draft_length_mode", "draft_length", "target_placement", "draft_placement", "tensor_planes", "draft_length_reason", "exports_traces")
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    TARGET_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PLANES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_REASON_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_TRACES_FIELD_NUMBER: _ClassVar[int]
    target_model: str
    draft_model: str
    max_model_len: int
    num_token_ids: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_speculative_tokens: int
    acceptance_method: _sampling_pb2.AcceptanceMethod
    draft_attached: bool
    version: str
    num_running: int
    num_waiting: int
    target_pages_free: int
    draft_pages_free: int
    draft_length_mode: str
    draft_length: float
    target_placement: ModelPlacement
    draft_placement: ModelPlacement
    tensor_planes: _containers.RepeatedScalarFieldContainer[str]
    draft_length_reason: str
    exports_traces: bool
    def __init__(self, target_model: _Optional[str] = ..., draft_model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_token_ids: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_speculative_tokens: _Optional[int] = ..., acceptance_method: _Optional[_Union[_sampling_pb2.AcceptanceMethod, str]] = ..., draft_attached: bool = ..., version: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., target_pages_free: _Optional[int] = ..., draft_pages_free: _Optional[int] = ..., draft_length_mode: _Optional[str] = ..., draft_length: _Optional[float] = ..., target_placement: _Optional[_Union[ModelPlacement, _Mapping]] = ..., draft_placement: _Optional[_Union[ModelPlacement, _Mapping]] = ..., tensor_planes: _Optional[_Iterable[str]] = ..., draft_length_reason: _Optional[str] = ..., exports_traces: bool = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("known_sha256",)
    KNOWN_SHA256_FIELD_NUMBER: _ClassVar[int]
    known_sha256: str
    def __init__(self, known_sha256: _Optional[str] = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("files", "bos_token_id", "sha256")
    FILES_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    bos_token_id: int
    sha256: str
    def __init__(self, files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ..., bos_token_id: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...
