"""Fields that several sections of the schema share, and checks of fields that go together."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

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
    Text,
)

HOST: Text = Field(
    "127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface, unix:/path is a socket file."
)
DEVICE: Device = Field(
    "auto", description="Where the model runs: cpu, cuda or cuda:N; auto is a GPU where there is one, else the CPU."
)
REVISION: Text | None = Field(
    None, description="Branch, tag or commit of a model on the Hugging Face Hub; unset: main."
)
SERVED_MODEL_NAME: Text | None = Field(
    None,
    description="Name of the model in answers, metrics and traces; unset: its id on the Hub, or its folder's name.",
)
DTYPE: Dtype = Field(
    "auto", description="Type of weights and KV cache; auto is float32 on a CPU, else the type on file."
)
PAGE_SIZE: Positive = Field(16, description="Tokens in a KV page.")
NUM_PAGES: Positive | None = Field(
    None, description="KV pages; unset: as many as kv_cache_bytes holds, else as a share of the free memory does."
)
KV_CACHE_BYTES: Positive | None = Field(
    None, description="Bytes for the KV cache, on each rank; not together with num_pages."
)
GPU_MEMORY_UTILIZATION: Share | None = Field(
    None,
    description="Share of its GPU's memory that weights, CUDA graphs and KV cache may take together; unset: 0.85 of "
    "what is free once the first two have theirs. Not together with num_pages or kv_cache_bytes.",
)
PREFIX_CACHING: bool = Field(
    True,
    description="Start a session after the KV pages of its prompt that are in the prefix cache, instead of computing"
    " them again.",
)
MAX_BATCHED_TOKENS: Positive | None = Field(
    None,
    description="Maximum number of tokens in one forward; longer prompts are split into chunks. Unset: 4,096 on a GPU,"
    " 1,024 on a CPU.",
)
MAX_PREFILL_BESIDE: Positive = Field(
    256,
    description="Maximum number of prompt tokens in a forward that also decodes running sessions, which wait for it.",
)
SERVED_REQUESTS: Positive = Field(
    256,
    description="Requests that run at the same time: the KV cache and CUDA graphs are made for so many, and more are"
    " served without graphs. outrider serve takes the coordinator's.",
)
SERVED_DRAFT_LENGTH: DraftLength = Field(
    16,
    description="Draft tokens in a step, at most: CUDA graphs are made for so many, and more are served without."
    " outrider serve takes the coordinator's.",
)
GRAPH_TOKENS: Positive = Field(
    1024,
    description="Tokens of a forward up to which CUDA graphs are captured; larger forwards take longer than"
    " launching them.",
)
GRAPH_MEMORY_MB: NonNegative | None = Field(
    None,
    description="Maximum memory of CUDA graphs, in MiB; the largest forwards are left out first, 0 captures none."
    " Unset: a 24th of the GPU's memory, 2048 at most.",
)
LOAD_FORMAT: LoadFormat = Field(
    "safetensors",
    description="safetensors; for measurements, weights made on the device: dummy (noise) or synthetic (the folder's"
    " recipe).",
)
TENSOR_PARALLEL_SIZE: Positive = Field(
    1, description="Processes that share the model, each on a device of its own, counted from the one named."
)
ONE_SHOT_ALL_REDUCE: bool = Field(
    True,
    description="Use a one-shot all-reduce over symmetric memory for small sums on GPUs of one host, where a"
    " comparison at the start finds it faster than NCCL; off: always NCCL.",
)
NUM_AWAKE_PROCESSORS: NonNegative | None = Field(
    None,
    description="Processors that this process is bound to and keeps from idling while it has sessions: lower latency"
    " for processor time. Unset: 1 with a GPU, on hosts with 8 processors or more and no quota; 0 in pods.",
)
NUM_THREADS: Positive | None = Field(None, description="Threads that compute on a CPU; unset: one for each core.")
TLS_CERT_FILE: Text | None = Field(
    None,
    description="Certificate chain (PEM) to serve with; set: the server speaks TLS only. Read again when the file"
    " changes.",
)
TLS_KEY_FILE: Text | None = Field(None, description="Its private key (PEM, without a password).")
TLS_CLIENT_CA_FILE: Text | None = Field(
    None,
    description="Authorities (PEM) of clients; set: clients must present a certificate signed by one of them (mutual"
    " TLS).",
)
SERVICE_TOKEN_FILE: Text | None = Field(
    None, description="Bearer tokens, one a line; coordinators must send one of them. Unset: no token is required."
)
LINK_TIMEOUT_MS: Positive = Field(
    15_000,
    description="Time without any message from a coordinator, heartbeats included, after which its sessions are"
    " released.",
)
MAX_SESSIONS_PER_LINK: Positive = Field(
    1024,
    description="Maximum number of open sessions of a coordinator; more are refused. Not below its"
    " max_running_requests.",
)
SESSION_IDLE_TIMEOUT_S: PositiveSeconds = Field(
    60.0,
    description="Time without a command after which a session releases its KV pages; a coordinator that continues it"
    " opens it again.",
)
HEALTH_PORT: Port | None = Field(
    None, description="Port of the health service over HTTP: /livez, /readyz, /startupz; unset: over gRPC only."
)
HEALTH_HOST: Text | None = Field(
    None, description="Address that health_port listens on; unset: host, or 127.0.0.1 where that is a socket file."
)
DRAIN_DELAY_S: Seconds = Field(
    1.0, description="Time after SIGTERM in which health says NOT_SERVING and calls are still accepted."
)
DRAIN_GRACE_S: Seconds = Field(30.0, description="Time after that in which running streams may finish.")
METRICS_PORT: Port | None = Field(
    None, description="Port of metrics for Prometheus over HTTP, at /metrics; unset: metrics are not served."
)
METRICS_HOST: Text | None = Field(
    None, description="Address that metrics_port listens on; unset: host, or 127.0.0.1 where that is a socket file."
)
VLLM_METRIC_NAMES: bool = Field(
    False, description="Serve metrics under vLLM's names too, where the meaning is the same (docs/metrics.md)."
)
LOG_INTERVAL_S: Seconds = Field(
    5.0, description="Interval at which a busy process logs its throughput and the time of each stage; 0: never."
)
TRACE_FILE: Text | None = Field(
    None,
    description="File that finished spans are appended to, one OTLP JSON object a line, besides the exporters of"
    " OTEL_*.",
)
LOG_LEVEL: LogLevel = Field("info", description="Lowest level that is logged: debug, info, warning or error.")


class Section(BaseModel):
    """The settings of one process."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: ClassVar[str]
    """The section's key in a file, and its part of a variable's name."""


def check_cache_size(section: Section) -> None:
    """``ValueError`` if the size of the KV cache is given in two ways."""
    sizes = ("num_pages", "kv_cache_bytes", "gpu_memory_utilization")
    values = section.model_dump()
    chosen = [name for name in sizes if values[name] is not None]
    if len(chosen) > 1:
        raise ValueError(f"{chosen[0]}: is set together with {chosen[1]}; one of them decides")
    if values["gpu_memory_utilization"] is not None and values["device"] == "cpu":
        raise ValueError("gpu_memory_utilization: is set, and the device is cpu: give kv_cache_bytes there")


def check_tls(section: Section) -> None:
    """``ValueError`` for files of the server's TLS that lack others."""
    check_both(section, "tls_cert_file", "tls_key_file")
    if getattr(section, "tls_client_ca_file", None) is not None and getattr(section, "tls_cert_file", None) is None:
        raise ValueError("tls_cert_file: is needed with tls_client_ca_file: clients show certificates over TLS alone")


def check_both(section: Section, cert: str, key: str) -> None:
    """``ValueError`` if only one of a certificate and its key is set."""
    given = [name for name in (cert, key) if getattr(section, name) is not None]
    if len(given) == 1:
        raise ValueError(f"{key if given == [cert] else cert}: is needed together with {given[0]}")


def max_batched_tokens(setting: int | None, *, is_gpu: bool) -> int:
    """The setting, or the device's default: on a GPU large chunks spare the pauses between smaller ones, on a CPU a
    short prompt would wait long for another one's large chunk.
    """
    if setting is not None:
        return setting
    return 4096 if is_gpu else 1024
