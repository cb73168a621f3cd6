"""Settings of the draft service."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    ClassPath,
    Device,
    DraftLength,
    DraftMethod,
    DraftSampleMethod,
    Dtype,
    LoadFormat,
    LogLevel,
    Method,
    NonNegative,
    NonNegativeFloat,
    Port,
    Positive,
    PositiveSeconds,
    Seconds,
    Share,
    Text,
    is_class_path,
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
    Section,
    check_cache_size,
    check_tls,
)


class DraftSettings(Section):
    """``outrider draft``: the small model, or the n-gram proposer."""

    name: ClassVar[str] = "draft"

    method: Method = Field(
        DraftMethod.NONE,
        description="draft_model; dflash, eagle, eagle3, mtp, medusa or mlp_speculator (heads over the target's hidden"
        " states; mtp: a layer of the target's own folder); ngram (prompt lookup) or suffix (suffix decoding) without a"
        " model; module:Class (a proposer of your own) or none;"
        " unset or draft_model: what config.json of the model says.",
    )
    target_model: Text | None = Field(
        None,
        description="Folder of the target, whose embedding, head and tokenizer dflash, eagle, eagle3 and mtp take;"
        " `outrider serve` gives its own.",
    )
    proposer: ClassPath | None = Field(
        None,
        description="Class of the proposer with method custom_class, as module:Class; method: module:Class sets both.",
    )
    model: Text | None = Field(
        None, description="Folder of the draft model in the Hugging Face layout, or its id on the Hub."
    )
    revision: Text | None = REVISION
    served_model_name: Text | None = SERVED_MODEL_NAME
    host: Text = HOST
    port: Port = Field(50052, description="Port to listen on.")
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
        None, description="Length after which the draft proposes nothing, in tokens; unset: the model's limit."
    )
    prefix_caching: bool = PREFIX_CACHING
    max_batched_tokens: Positive | None = MAX_BATCHED_TOKENS
    max_prefill_beside: Positive = MAX_PREFILL_BESIDE
    max_running_requests: Positive = SERVED_REQUESTS
    num_speculative_tokens: DraftLength = SERVED_DRAFT_LENGTH
    cuda_graph_max_tokens: Positive = GRAPH_TOKENS
    cuda_graph_memory_mb: NonNegative | None = GRAPH_MEMORY_MB
    num_threads: Positive | None = NUM_THREADS
    num_awake_processors: NonNegative | None = NUM_AWAKE_PROCESSORS
    attention_window: Positive | None = Field(
        None,
        description="Last tokens of a text that the draft model attends to, and the first attention_sinks; unset: all. "
        "Long contexts then cost the draft less and it agrees with the target less often; what is generated stays "
        "exact.",
    )
    attention_sinks: NonNegative = Field(
        4, description="First tokens of a text that the draft model attends to besides its attention_window."
    )
    prompt_lookup_max: Positive = Field(5, description="Maximum length of the n-grams that are looked up, in tokens.")
    prompt_lookup_min: Positive = Field(5, description="Minimum length of the n-grams that are looked up, in tokens.")
    suffix_decoding_max_tree_depth: Positive = Field(
        24, description="suffix: maximum length of a match and its continuation together, in tokens."
    )
    suffix_decoding_max_spec_factor: NonNegativeFloat = Field(
        1.0, description="suffix: maximum number of draft tokens for each token of the match."
    )
    suffix_decoding_min_token_prob: Share = Field(
        0.1,
        description="suffix: minimum probability of a draft token and all before it, by how often they followed the"
        " match.",
    )
    suffix_decoding_max_cached_tokens: NonNegative = Field(
        1 << 18,
        description="suffix: tokens of outputs of all requests in which greedy and coupled requests look for matches,"
        " about 400 bytes each; 0: only in the request's own text. Requests of different cache_salt share none.",
    )
    draft_sample_method: DraftSampleMethod = Field(
        DraftSampleMethod.PROBABILISTIC,
        description="Draft tokens of sampled requests: probabilistic (drawn from the draft's distribution) or"
        " greedy (its most likely token). Exact with either; coupled requests always share the target's noise.",
    )
    support_mass: Share = Field(
        0.999, description="Rejection: the draft samples from its most likely tokens with this probability mass."
    )
    support_limit: Positive = Field(
        1024, description="Rejection: maximum number of tokens that the draft samples from."
    )
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
    trace_file: Text | None = TRACE_FILE
    log_level: LogLevel = LOG_LEVEL
    log_interval_s: Seconds = LOG_INTERVAL_S

    @model_validator(mode="before")
    @classmethod
    def _method_from_model(cls, data: Any) -> Any:  # noqa: ANN401 - raw input
        if not isinstance(data, dict):
            return data
        if is_class_path(data.get("method")):
            return {**data, "method": DraftMethod.CUSTOM_CLASS, "proposer": data["method"]}
        if data.get("method") in ("mtp", "mimo_mtp") and data.get("model") is not None:
            # vLLM's model of an MTP layer is the target, which holds it.
            return {**data, "model": None, "target_model": data.get("target_model") or data["model"]}
        if data.get("method") is not None:
            return data
        # vLLM lets the model's name stand for the method.
        if data.get("model") == DraftMethod.NGRAM:
            return {**data, "method": DraftMethod.NGRAM, "model": None}
        return {**data, "method": DraftMethod.DRAFT_MODEL if data.get("model") else DraftMethod.NONE}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_cache_size(self)
        check_tls(self)
        if self.method is DraftMethod.DRAFT_MODEL and self.model is None:
            raise ValueError("model: is needed by method draft_model")
        if self.method.is_head and self.method.needs_model and self.model is None:
            raise ValueError(f"model: is needed by method {self.method}")
        if self.method.is_head and self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: is {self.tensor_parallel_size}; a head runs on one GPU, method {self.method}"
            )
        if (self.method is DraftMethod.CUSTOM_CLASS) != (self.proposer is not None):
            raise ValueError("proposer: goes with method custom_class, and that with it")
        if not self.method.has_model and self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: is {self.tensor_parallel_size}, and without a model there is nothing to share"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self
