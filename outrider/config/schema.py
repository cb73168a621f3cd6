"""Schema of the settings: default, unit and meaning of each. ``docs/configuration.md`` is generated from it.

Names contain the units ``_ms``, ``_s`` and ``_bytes``; counts begin with ``num_`` or ``max_``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.config.fields import (
    Acceptance,
    ClassPath,
    Defaults,
    Device,
    DraftLength,
    DraftLengthMode,
    DraftMethod,
    Dtype,
    GenerationConfig,
    LoadFormat,
    LogLevel,
    Logprobs,
    MaxLogprobs,
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
from outrider.types import AcceptanceMethod, LogprobsMode

_HOST: Text = Field(
    "127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface, unix:/path is a socket file."
)
_DEVICE: Device = Field(
    "auto", description="Where the model runs: cpu, cuda or cuda:N; auto is a GPU where there is one, else the CPU."
)
_REVISION: Text | None = Field(
    None, description="Branch, tag or commit of a model on the Hugging Face Hub; unset: main."
)
_SERVED_MODEL_NAME: Text | None = Field(
    None,
    description="Name of the model in answers, metrics and traces; unset: its id on the Hub, or its folder's name.",
)
_DTYPE: Dtype = Field(
    "auto", description="Type of weights and KV cache; auto is float32 on a CPU, else the type on file."
)
_PAGE_SIZE: Positive = Field(16, description="Tokens in a KV page.")
_NUM_PAGES: Positive | None = Field(
    None, description="KV pages; unset: as many as kv_cache_bytes holds, else as a share of the free memory does."
)
_KV_CACHE_BYTES: Positive | None = Field(
    None, description="Bytes for the KV cache, on each rank; not together with num_pages."
)
_GPU_MEMORY_UTILIZATION: Share | None = Field(
    None,
    description="Share of its GPU's memory that weights, CUDA graphs and KV cache may take together; unset: 0.85 of "
    "what is free once the first two have theirs. Not together with num_pages or kv_cache_bytes.",
)
_PREFIX_CACHING: bool = Field(
    True,
    description="Start a session after the KV pages of its prompt that are in the prefix cache, instead of computing"
    " them again.",
)
_MAX_BATCHED_TOKENS: Positive = Field(
    1024, description="Maximum number of tokens in one forward; longer prompts are split into chunks."
)
_MAX_PREFILL_BESIDE: Positive = Field(
    256,
    description="Maximum number of prompt tokens in a forward that also decodes running sessions, which wait for it.",
)
_SERVED_REQUESTS: Positive = Field(
    256,
    description="Requests that run at the same time: the KV cache and CUDA graphs are made for so many, and more are"
    " served without graphs. outrider serve takes the coordinator's.",
)
_SERVED_DRAFT_LENGTH: DraftLength = Field(
    16,
    description="Draft tokens in a step, at most: CUDA graphs are made for so many, and more are served without."
    " outrider serve takes the coordinator's.",
)
_GRAPH_TOKENS: Positive = Field(
    1024,
    description="Tokens of a forward up to which CUDA graphs are captured; larger forwards take longer than"
    " launching them.",
)
_GRAPH_MEMORY_MB: NonNegative | None = Field(
    None,
    description="Maximum memory of CUDA graphs, in MiB; the largest forwards are left out first, 0 captures none."
    " Unset: a 24th of the GPU's memory, 2048 at most.",
)
_LOAD_FORMAT: LoadFormat = Field(
    "safetensors",
    description="safetensors; for measurements, weights made on the device: dummy (noise) or synthetic (the folder's"
    " recipe).",
)
_TENSOR_PARALLEL_SIZE: Positive = Field(
    1, description="Processes that share the model, each on a device of its own, counted from the one named."
)
_ONE_SHOT_ALL_REDUCE: bool = Field(
    True,
    description="Use a one-shot all-reduce over symmetric memory for small sums on GPUs of one host, where a"
    " comparison at the start finds it faster than NCCL; off: always NCCL.",
)
_NUM_AWAKE_PROCESSORS: NonNegative | None = Field(
    None,
    description="Processors that this process is bound to and keeps from idling while it has sessions: lower latency"
    " for processor time. Unset: 1 with a GPU, on hosts with 8 processors or more and no quota; 0 in pods.",
)
_NUM_THREADS: Positive | None = Field(None, description="Threads that compute on a CPU; unset: one for each core.")
_TLS_CERT_FILE: Text | None = Field(
    None,
    description="Certificate chain (PEM) to serve with; set: the server speaks TLS only. Read again when the file"
    " changes.",
)
_TLS_KEY_FILE: Text | None = Field(None, description="Its private key (PEM, without a password).")
_TLS_CLIENT_CA_FILE: Text | None = Field(
    None,
    description="Authorities (PEM) of clients; set: clients must present a certificate signed by one of them (mutual"
    " TLS).",
)
_SERVICE_TOKEN_FILE: Text | None = Field(
    None, description="Bearer tokens, one a line; coordinators must send one of them. Unset: no token is required."
)
_LINK_TIMEOUT_MS: Positive = Field(
    15_000,
    description="Time without any message from a coordinator, heartbeats included, after which its sessions are"
    " released.",
)
_MAX_SESSIONS_PER_LINK: Positive = Field(
    1024,
    description="Maximum number of open sessions of a coordinator; more are refused. Not below its"
    " max_running_requests.",
)
_SESSION_IDLE_TIMEOUT_S: PositiveSeconds = Field(
    60.0,
    description="Time without a command after which a session releases its KV pages; a coordinator that continues it"
    " opens it again.",
)
_HEALTH_PORT: Port | None = Field(
    None, description="Port of the health service over HTTP: /livez, /readyz, /startupz; unset: over gRPC only."
)
_HEALTH_HOST: Text | None = Field(
    None, description="Address that health_port listens on; unset: host, or 127.0.0.1 where that is a socket file."
)
_DRAIN_DELAY_S: Seconds = Field(
    1.0, description="Time after SIGTERM in which health says NOT_SERVING and calls are still accepted."
)
_DRAIN_GRACE_S: Seconds = Field(30.0, description="Time after that in which running streams may finish.")
_METRICS_PORT: Port | None = Field(
    None, description="Port of metrics for Prometheus over HTTP, at /metrics; unset: metrics are not served."
)
_METRICS_HOST: Text | None = Field(
    None, description="Address that metrics_port listens on; unset: host, or 127.0.0.1 where that is a socket file."
)
_VLLM_METRIC_NAMES: bool = Field(
    False, description="Serve metrics under vLLM's names too, where the meaning is the same (docs/metrics.md)."
)
_LOG_INTERVAL_S: Seconds = Field(
    5.0, description="Interval at which a busy process logs its throughput and the time of each stage; 0: never."
)
_TRACE_FILE: Text | None = Field(
    None,
    description="File that finished spans are appended to, one OTLP JSON object a line, besides the exporters of"
    " OTEL_*.",
)
_LOG_LEVEL: LogLevel = Field("info", description="Lowest level that is logged: debug, info, warning or error.")


class Section(BaseModel):
    """The settings of one process."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: ClassVar[str]
    """The section's key in a file, and its part of a variable's name."""


class TargetSettings(Section):
    """``outrider target``: the large model."""

    name: ClassVar[str] = "target"

    model: Text = Field(description="Folder of the model in the Hugging Face layout, or its id on the Hub.")
    revision: Text | None = _REVISION
    served_model_name: Text | None = _SERVED_MODEL_NAME
    host: Text = _HOST
    port: Port = Field(50051, description="Port to listen on.")
    load_format: LoadFormat = _LOAD_FORMAT
    device: Device = _DEVICE
    tensor_parallel_size: Positive = _TENSOR_PARALLEL_SIZE
    one_shot_all_reduce: bool = _ONE_SHOT_ALL_REDUCE
    dtype: Dtype = _DTYPE
    page_size: Positive = _PAGE_SIZE
    num_pages: Positive | None = _NUM_PAGES
    kv_cache_bytes: Positive | None = _KV_CACHE_BYTES
    gpu_memory_utilization: Share | None = _GPU_MEMORY_UTILIZATION
    max_model_len: Positive | None = Field(
        None, description="Maximum length of prompt and output together, in tokens; unset: the model's."
    )
    prefix_caching: bool = _PREFIX_CACHING
    max_batched_tokens: Positive = _MAX_BATCHED_TOKENS
    max_prefill_beside: Positive = _MAX_PREFILL_BESIDE
    max_running_requests: Positive = _SERVED_REQUESTS
    num_speculative_tokens: DraftLength = _SERVED_DRAFT_LENGTH
    cuda_graph_max_tokens: Positive = _GRAPH_TOKENS
    cuda_graph_memory_mb: NonNegative | None = _GRAPH_MEMORY_MB
    compute_ahead: bool = Field(
        True,
        description="While no session speculates, compute up to two plain steps of each before they are asked for.",
    )
    num_threads: Positive | None = _NUM_THREADS
    num_awake_processors: NonNegative | None = _NUM_AWAKE_PROCESSORS
    tls_cert_file: Text | None = _TLS_CERT_FILE
    tls_key_file: Text | None = _TLS_KEY_FILE
    tls_client_ca_file: Text | None = _TLS_CLIENT_CA_FILE
    link_token_file: Text | None = _SERVICE_TOKEN_FILE
    link_timeout_ms: Positive = _LINK_TIMEOUT_MS
    max_sessions_per_link: Positive = _MAX_SESSIONS_PER_LINK
    session_idle_timeout_s: PositiveSeconds = _SESSION_IDLE_TIMEOUT_S
    health_port: Port | None = _HEALTH_PORT
    health_host: Text | None = _HEALTH_HOST
    drain_delay_s: Seconds = _DRAIN_DELAY_S
    drain_grace_s: Seconds = _DRAIN_GRACE_S
    metrics_port: Port | None = _METRICS_PORT
    metrics_host: Text | None = _METRICS_HOST
    vllm_metric_names: bool = _VLLM_METRIC_NAMES
    trace_file: Text | None = _TRACE_FILE
    log_level: LogLevel = _LOG_LEVEL
    log_interval_s: Seconds = _LOG_INTERVAL_S

    @model_validator(mode="after")
    def _one_cache_size(self) -> Self:
        _check_cache_size(self)
        _check_tls(self)
        return self


class DraftSettings(Section):
    """``outrider draft``: the small model, or the n-gram proposer."""

    name: ClassVar[str] = "draft"

    method: Method = Field(
        DraftMethod.NONE,
        description="draft_model; eagle3, medusa or mlp_speculator (heads over the target's hidden states); ngram"
        " (prompt lookup) or suffix (suffix decoding) without a model; module:Class (a proposer of your own) or none;"
        " unset: draft_model where a model is set.",
    )
    target_model: Text | None = Field(
        None,
        description="Folder of the target, whose embedding and tokenizer eagle3 takes; `outrider serve` gives its own.",
    )
    proposer: ClassPath | None = Field(
        None,
        description="Class of the proposer with method custom_class, as module:Class; method: module:Class sets both.",
    )
    model: Text | None = Field(
        None, description="Folder of the draft model in the Hugging Face layout, or its id on the Hub."
    )
    revision: Text | None = _REVISION
    served_model_name: Text | None = _SERVED_MODEL_NAME
    host: Text = _HOST
    port: Port = Field(50052, description="Port to listen on.")
    load_format: LoadFormat = _LOAD_FORMAT
    device: Device = _DEVICE
    tensor_parallel_size: Positive = _TENSOR_PARALLEL_SIZE
    one_shot_all_reduce: bool = _ONE_SHOT_ALL_REDUCE
    dtype: Dtype = _DTYPE
    page_size: Positive = _PAGE_SIZE
    num_pages: Positive | None = _NUM_PAGES
    kv_cache_bytes: Positive | None = _KV_CACHE_BYTES
    gpu_memory_utilization: Share | None = _GPU_MEMORY_UTILIZATION
    max_model_len: Positive | None = Field(
        None, description="Length after which the draft proposes nothing, in tokens; unset: the model's limit."
    )
    prefix_caching: bool = _PREFIX_CACHING
    max_batched_tokens: Positive = _MAX_BATCHED_TOKENS
    max_prefill_beside: Positive = _MAX_PREFILL_BESIDE
    max_running_requests: Positive = _SERVED_REQUESTS
    num_speculative_tokens: DraftLength = _SERVED_DRAFT_LENGTH
    cuda_graph_max_tokens: Positive = _GRAPH_TOKENS
    cuda_graph_memory_mb: NonNegative | None = _GRAPH_MEMORY_MB
    num_threads: Positive | None = _NUM_THREADS
    num_awake_processors: NonNegative | None = _NUM_AWAKE_PROCESSORS
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
    support_mass: Share = Field(
        0.999, description="Rejection: the draft samples from its most likely tokens with this probability mass."
    )
    support_limit: Positive = Field(
        1024, description="Rejection: maximum number of tokens that the draft samples from."
    )
    tls_cert_file: Text | None = _TLS_CERT_FILE
    tls_key_file: Text | None = _TLS_KEY_FILE
    tls_client_ca_file: Text | None = _TLS_CLIENT_CA_FILE
    link_token_file: Text | None = _SERVICE_TOKEN_FILE
    link_timeout_ms: Positive = _LINK_TIMEOUT_MS
    max_sessions_per_link: Positive = _MAX_SESSIONS_PER_LINK
    session_idle_timeout_s: PositiveSeconds = _SESSION_IDLE_TIMEOUT_S
    health_port: Port | None = _HEALTH_PORT
    health_host: Text | None = _HEALTH_HOST
    drain_delay_s: Seconds = _DRAIN_DELAY_S
    drain_grace_s: Seconds = _DRAIN_GRACE_S
    metrics_port: Port | None = _METRICS_PORT
    metrics_host: Text | None = _METRICS_HOST
    trace_file: Text | None = _TRACE_FILE
    log_level: LogLevel = _LOG_LEVEL
    log_interval_s: Seconds = _LOG_INTERVAL_S

    @model_validator(mode="before")
    @classmethod
    def _method_from_model(cls, data: Any) -> Any:  # noqa: ANN401 - raw input
        if not isinstance(data, dict):
            return data
        if is_class_path(data.get("method")):
            return {**data, "method": DraftMethod.CUSTOM_CLASS, "proposer": data["method"]}
        if data.get("method") is not None:
            return data
        # vLLM lets the model's name stand for the method.
        if data.get("model") == DraftMethod.NGRAM:
            return {**data, "method": DraftMethod.NGRAM, "model": None}
        return {**data, "method": DraftMethod.DRAFT_MODEL if data.get("model") else DraftMethod.NONE}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_cache_size(self)
        _check_tls(self)
        if self.method is DraftMethod.DRAFT_MODEL and self.model is None:
            raise ValueError("model: is needed by method draft_model")
        if self.method.is_head and (self.model is None or self.tensor_parallel_size != 1):
            raise ValueError(f"model: is needed by method {self.method}, and tensor_parallel_size has to be 1")
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


class CoordinatorSettings(Section):
    """``outrider coordinator``: the public service."""

    name: ClassVar[str] = "coordinator"

    host: Text = _HOST
    port: Port = Field(50050, description="Port to listen on.")
    num_processes: Positive = Field(
        1,
        description="Processes that outrider serve starts of it, on one port: the kernel spreads connections. Limits,"
        " queue, prefix affinity and draft lengths are of each process.",
    )
    reuse_port: bool = Field(False, description="Let other coordinators of this host listen on the same port too.")
    target_address: Text = Field(
        "127.0.0.1:50051",
        description="Addresses of the targets: host:port or unix:/path, separated by commas; each address of a host"
        " is one target.",
    )
    draft_address: Text | None = Field(None, description="Addresses of the drafts, likewise; unset: no speculation.")
    resolve_interval_s: PositiveSeconds = Field(
        5.0,
        description="Interval at which the names of those hosts are resolved again, for replicas that were added or"
        " removed.",
    )
    num_speculative_tokens: DraftLength = Field(
        8, description="Maximum draft length, for requests without one of their own; 0: no speculation."
    )
    draft_length: DraftLengthMode = Field(
        DraftLengthMode.AUTO,
        description="auto: chosen for each step by expected throughput, 0 included; fixed: always the maximum.",
    )
    acceptance_method: Acceptance = Field(
        AcceptanceMethod.REJECTION,
        description="Acceptance rule of requests without one of their own: rejection, coupled or typical.",
    )
    posterior_threshold: NonNegativeFloat = Field(0.09, description="Typical acceptance: the fixed threshold.")
    posterior_alpha: NonNegativeFloat = Field(0.3, description="Typical acceptance: the factor of the entropy.")
    disable_by_batch_size: NonNegative = Field(
        0,
        description="Number of running and waiting requests from which on nothing is speculated, until there are"
        " fewer; 0: no limit.",
    )
    draft_timeout_ms: Positive = Field(
        1000,
        description="Maximum time that a step waits for a proposal before it continues without; half of it for a"
        " draft that"
        " usually answers quickly, and no wait while it does not answer at all.",
    )
    link_timeout_ms: Positive = Field(
        3000,
        description="Time without any message from a target or draft, heartbeats included, after which its sessions"
        " continue"
        " elsewhere. Also the time that connecting may take.",
    )
    target_timeout_s: PositiveSeconds = Field(60.0, description="Time that requests wait for a lost target to return.")
    max_running_requests: Positive = Field(
        256, description="Requests that run at the same time, for each target that is attached."
    )
    max_queue: NonNegative = Field(256, description="Maximum number of waiting requests; more are refused.")
    num_awake_processors: NonNegative | None = Field(
        None,
        description="Processors that this process is bound to and keeps from idling while requests run: lower"
        " latency for"
        " processor time. Unset: 1 on hosts with 8 processors or more and no quota; 0 in pods.",
    )
    tokenizer: Text | None = Field(None, description="Folder of a tokenizer that replaces the target's.")
    generation_config: Defaults = Field(
        GenerationConfig.AUTO,
        description="auto: temperature, top_p, top_k, min_p and repetition_penalty that a request leaves out are those"
        " of the target's generation_config.json; none: they are off.",
    )
    logprobs_mode: Logprobs = Field(
        LogprobsMode.RAW,
        description="raw: of the model's distribution; processed: of the distribution that was sampled from.",
    )
    disable_logprobs: bool = Field(False, description="Refuse requests that ask for logprobs.")
    max_logprobs: MaxLogprobs = Field(
        20,
        description="Maximum number of logprobs that a request may ask for at each position of prompt and output.",
    )
    tls_cert_file: Text | None = _TLS_CERT_FILE
    tls_key_file: Text | None = _TLS_KEY_FILE
    tls_client_ca_file: Text | None = _TLS_CLIENT_CA_FILE
    api_token_file: Text | None = Field(
        None, description="Bearer tokens, one a line; users must send one of them. Unset: no token is required."
    )
    link_tls_ca_file: Text | None = Field(
        None, description="Authorities (PEM) of the certificates of target and draft; set: links speak TLS."
    )
    link_tls_cert_file: Text | None = Field(
        None, description="Certificate chain (PEM) to show them, where they ask for one (mutual TLS)."
    )
    link_tls_key_file: Text | None = Field(None, description="Its private key (PEM, without a password).")
    link_tls_server_name: Text | None = Field(
        None, description="Name that their certificates bear; unset: the host of the address."
    )
    link_token_file: Text | None = Field(
        None, description="File whose first line is the bearer token that is sent to target and draft."
    )
    allow_plaintext_link_token: bool = Field(
        False, description="Send that token to another host without TLS, where the network is trusted."
    )
    max_connection_age_s: PositiveSeconds | None = Field(
        None,
        description="Age at which users' connections are closed, so that a load balancer spreads them again; unset:"
        " never.",
    )
    max_connection_age_grace_s: PositiveSeconds | None = Field(
        None, description="Time that calls on such a connection may take to finish; unset: no limit."
    )
    health_port: Port | None = _HEALTH_PORT
    health_host: Text | None = _HEALTH_HOST
    drain_delay_s: Seconds = _DRAIN_DELAY_S
    drain_grace_s: Seconds = _DRAIN_GRACE_S
    metrics_port: Port | None = _METRICS_PORT
    metrics_host: Text | None = _METRICS_HOST
    vllm_metric_names: bool = _VLLM_METRIC_NAMES
    max_traced_steps: NonNegative = Field(
        256, description="Steps of a traced request with a span of their own; further steps are counted."
    )
    trace_file: Text | None = _TRACE_FILE
    log_level: LogLevel = _LOG_LEVEL
    log_interval_s: Seconds = _LOG_INTERVAL_S

    @model_validator(mode="after")
    def _secure(self) -> Self:
        _check_tls(self)
        for key in ("link_tls_cert_file", "link_tls_key_file", "link_tls_server_name"):
            if getattr(self, key) is not None and self.link_tls_ca_file is None:
                raise ValueError(f"link_tls_ca_file: is needed with {key}: links speak TLS when it is set")
        _check_both(self, "link_tls_cert_file", "link_tls_key_file")
        return self


class GatewaySettings(Section):
    """``outrider gateway``: the OpenAI-compatible HTTP API."""

    name: ClassVar[str] = "gateway"

    enabled: bool = Field(True, description="Whether outrider serve starts it.")
    num_processes: Positive = Field(
        1, description="Processes that outrider serve starts of it, on one port: the kernel spreads connections."
    )
    host: Text = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 is every interface. Unset, outrider serve takes the coordinator's.",
    )
    port: Port = Field(8000, description="Port to listen on.")
    reuse_port: bool = Field(False, description="Let other gateways of this host listen on the same port too.")
    coordinator_address: Text = Field(
        "127.0.0.1:50050",
        description="Where the coordinators are: host:port or unix:/path, several with commas; the first that answers"
        " serves.",
    )
    served_model_name: Text | None = Field(
        None, description="Names that requests may use, with commas, the first in answers; unset: the coordinator's."
    )
    api_token_file: Text | None = Field(
        None,
        description="API keys, one a line, of which requests must bring one as a bearer token; unset: none is asked"
        " for here, and the key of a request goes on to the coordinator. outrider serve takes the coordinator's.",
    )
    coordinator_token_file: Text | None = Field(
        None, description="File whose first line is the bearer token to bring to coordinators; unset: api_token_file."
    )
    allow_plaintext_token: bool = Field(
        False, description="Send that token to another host without TLS, where the network is trusted."
    )
    coordinator_tls: bool = Field(False, description="Speak TLS with coordinators, trusting public authorities.")
    coordinator_tls_ca_file: Text | None = Field(
        None, description="Authorities (PEM) of the coordinators' certificates; set: TLS is spoken with them."
    )
    coordinator_tls_cert_file: Text | None = Field(
        None, description="Certificate chain (PEM) to show them, where they ask for one (mutual TLS)."
    )
    coordinator_tls_key_file: Text | None = Field(None, description="Its private key (PEM, without a password).")
    coordinator_tls_server_name: Text | None = Field(
        None, description="Name that their certificates bear; unset: the host of the address."
    )
    tls_cert_file: Text | None = Field(
        None,
        description="Certificate chain (PEM) to serve with; set: only HTTPS is spoken. outrider serve takes the"
        " coordinator's.",
    )
    tls_key_file: Text | None = _TLS_KEY_FILE
    tls_client_ca_file: Text | None = _TLS_CLIENT_CA_FILE
    max_body_bytes: Positive = Field(16 << 20, description="Most bytes of a request's body.")
    resume_timeout_s: Seconds = Field(
        30.0,
        description="How long a stream may wait, after its coordinator went away, until one takes it up again without a"
        " lost or repeated token; 0: it ends with an error at once.",
    )
    drain_delay_s: Seconds = _DRAIN_DELAY_S
    drain_grace_s: Seconds = _DRAIN_GRACE_S
    metrics_port: Port | None = _METRICS_PORT
    metrics_host: Text | None = _METRICS_HOST
    trace_file: Text | None = _TRACE_FILE
    log_level: LogLevel = _LOG_LEVEL

    @model_validator(mode="after")
    def _secure(self) -> Self:
        _check_tls(self)
        _check_both(self, "coordinator_tls_cert_file", "coordinator_tls_key_file")
        return self


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections, as ``outrider serve`` reads them."""

    target: TargetSettings
    draft: DraftSettings
    coordinator: CoordinatorSettings
    gateway: GatewaySettings = field(default_factory=lambda: GatewaySettings.model_validate({}))


SECTIONS: dict[str, type[Section]] = {
    section.name: section for section in (TargetSettings, DraftSettings, CoordinatorSettings, GatewaySettings)
}


def to_argv(section: Section) -> list[str]:
    """Return the flags that reproduce this section; defaults are left out."""
    argv: list[str] = []
    for key, value in section.model_dump(exclude_defaults=True).items():
        if value is not None:
            argv += _flag(key, value)
    return argv


def _flag(key: str, value: object) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value.value if isinstance(value, enum.Enum) else value)]


def _check_cache_size(section: TargetSettings | DraftSettings) -> None:
    sizes = ("num_pages", "kv_cache_bytes", "gpu_memory_utilization")
    chosen = [name for name in sizes if getattr(section, name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"{chosen[0]}: is set together with {chosen[1]}; one of them decides")
    if section.gpu_memory_utilization is not None and section.device == "cpu":
        raise ValueError("gpu_memory_utilization: is set, and the device is cpu: give kv_cache_bytes there")


def _check_tls(section: Section) -> None:
    _check_both(section, "tls_cert_file", "tls_key_file")
    if getattr(section, "tls_client_ca_file", None) is not None and getattr(section, "tls_cert_file", None) is None:
        raise ValueError("tls_cert_file: is needed with tls_client_ca_file: clients show certificates over TLS alone")


def _check_both(section: Section, cert: str, key: str) -> None:
    given = [name for name in (cert, key) if getattr(section, name) is not None]
    if len(given) == 1:
        raise ValueError(f"{key if given == [cert] else cert}: is needed together with {given[0]}")
