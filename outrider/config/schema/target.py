"""Settings of the target service."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    Device,
    DraftLength,
    Dtype,
    LoadFormat,
    LogLevel,
    NonNegative,
    Port,
    Positive,
    PositiveSeconds,
    Seconds,
    Share,
    TensorPlane,
    Text,
)
from outrider.config.schema.common import (
    DEVICE,
    DRAIN_DELAY_S,
    DRAIN_GRACE_S,
    DTYPE,
    GPU_MEMORY_UTILIZATION,
    GRAPH_MEMORY_MB,
    GRAPH_TOKENS,
    HEALTH_HOST,
    HEALTH_PORT,
    HOST,
    KV_CACHE_BYTES,
    LINK_TIMEOUT_MS,
    LOAD_FORMAT,
    LOG_INTERVAL_S,
    LOG_LEVEL,
    MAX_BATCHED_TOKENS,
    MAX_PREFILL_BESIDE,
    MAX_SESSIONS_PER_LINK,
    METRICS_HOST,
    METRICS_PORT,
    NUM_AWAKE_PROCESSORS,
    NUM_PAGES,
    NUM_THREADS,
    ONE_SHOT_ALL_REDUCE,
    PAGE_SIZE,
    PREFIX_CACHING,
    REVISION,
    SERVED_DRAFT_LENGTH,
    SERVED_MODEL_NAME,
    SERVED_REQUESTS,
    SERVICE_TOKEN_FILE,
    SESSION_IDLE_TIMEOUT_S,
    TENSOR_PARALLEL_SIZE,
    TLS_CERT_FILE,
    TLS_CLIENT_CA_FILE,
    TLS_KEY_FILE,
    TRACE_FILE,
    VLLM_METRIC_NAMES,
    Section,
    check_cache_size,
    check_tls,
)


class TargetSettings(Section):
    """``outrider target``: the large model."""

    name: ClassVar[str] = "target"

    model: Text = Field(description="Folder of the model in the Hugging Face layout, or its id on the Hub.")
    revision: Text | None = REVISION
    served_model_name: Text | None = SERVED_MODEL_NAME
    host: Text = HOST
    port: Port = Field(50051, description="Port to listen on.")
    load_format: LoadFormat = LOAD_FORMAT
    device: Device = DEVICE
    tensor_parallel_size: Positive = TENSOR_PARALLEL_SIZE
    one_shot_all_reduce: bool = ONE_SHOT_ALL_REDUCE
    dtype: Dtype = DTYPE
    page_size: Positive = PAGE_SIZE
    num_pages: Positive | None = NUM_PAGES
    kv_cache_bytes: Positive | None = KV_CACHE_BYTES
    gpu_memory_utilization: Share | None = GPU_MEMORY_UTILIZATION
    max_model_len: Positive | None = Field(
        None, description="Maximum length of prompt and output together, in tokens; unset: the model's."
    )
    prefix_caching: bool = PREFIX_CACHING
    max_batched_tokens: Positive | None = MAX_BATCHED_TOKENS
    max_prefill_beside: Positive = MAX_PREFILL_BESIDE
    max_running_requests: Positive = SERVED_REQUESTS
    num_speculative_tokens: DraftLength = SERVED_DRAFT_LENGTH
    cuda_graph_max_tokens: Positive = GRAPH_TOKENS
    cuda_graph_memory_mb: NonNegative | None = GRAPH_MEMORY_MB
    compute_ahead: bool = Field(
        True,
        description="While no session speculates, compute up to two plain steps of each before they are asked for.",
    )
    tensor_plane: TensorPlane = Field(
        TensorPlane.AUTO,
        description="How hidden states reach a draft that reads them: auto is the fastest of the planes that both sides"
        " can use; inline is through the coordinator; shared_memory, gloo, nccl or cuda_ipc force one, and what it"
        " cannot take goes inline. With TLS, auto uses planes within a host only.",
    )
    num_threads: Positive | None = NUM_THREADS
    num_awake_processors: NonNegative | None = NUM_AWAKE_PROCESSORS
    tls_cert_file: Text | None = TLS_CERT_FILE
    tls_key_file: Text | None = TLS_KEY_FILE
    tls_client_ca_file: Text | None = TLS_CLIENT_CA_FILE
    link_token_file: Text | None = SERVICE_TOKEN_FILE
    link_timeout_ms: Positive = LINK_TIMEOUT_MS
    max_sessions_per_link: Positive = MAX_SESSIONS_PER_LINK
    session_idle_timeout_s: PositiveSeconds = SESSION_IDLE_TIMEOUT_S
    health_port: Port | None = HEALTH_PORT
    health_host: Text | None = HEALTH_HOST
    drain_delay_s: Seconds = DRAIN_DELAY_S
    drain_grace_s: Seconds = DRAIN_GRACE_S
    metrics_port: Port | None = METRICS_PORT
    metrics_host: Text | None = METRICS_HOST
    vllm_metric_names: bool = VLLM_METRIC_NAMES
    trace_file: Text | None = TRACE_FILE
    log_level: LogLevel = LOG_LEVEL
    log_interval_s: Seconds = LOG_INTERVAL_S

    @model_validator(mode="after")
    def _one_cache_size(self) -> Self:
        check_cache_size(self)
        check_tls(self)
        return self
