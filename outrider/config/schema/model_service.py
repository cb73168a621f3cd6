"""Settings that the target and the draft service share: those of a service that runs a model."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    BatchInvariant,
    Device,
    DraftLength,
    Dtype,
    Host,
    KVCacheDtype,
    KVCacheScales,
    LoadFormat,
    LogLevel,
    ModelImplementation,
    NonNegative,
    Port,
    Positive,
    PositiveSeconds,
    Quantization,
    Seconds,
    Share,
    Text,
)
from outrider.config.schema.common import (
    DRAIN_DELAY_S,
    DRAIN_GRACE_S,
    HANG_TIMEOUT_S,
    HEALTH_HOST,
    HEALTH_PORT,
    HOST,
    LOG_INTERVAL_S,
    LOG_LEVEL,
    METRICS_HOST,
    METRICS_PORT,
    TLS_CERT_FILE,
    TLS_CLIENT_CA_FILE,
    TLS_KEY_FILE,
    TRACE_FILE,
    Section,
    check_tls,
)


class ModelServiceSettings(Section):
    """Model, devices, KV cache, scheduler, links and server of one service."""

    revision: Text | None = Field(
        None, description="Branch, tag or commit of a model on the Hugging Face Hub; unset: main."
    )
    served_model_name: Text | None = Field(
        None,
        description="Name of the model in answers, metrics and traces; unset: its id on the Hub, or its folder's name.",
    )
    host: Host = HOST
    load_format: LoadFormat = Field(
        "safetensors",
        description="safetensors; for measurements, weights made on the device: dummy (noise) or synthetic (the"
        " folder's recipe).",
    )
    device: Device = Field(
        "auto", description="Where the model runs: cpu, cuda or cuda:N; auto is a GPU where there is one, else the CPU."
    )
    tensor_parallel_size: Positive = Field(
        1, description="Processes that share the model, each on a device of its own, counted from the one named."
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Divide whole experts over the processes of tensor_parallel_size, instead of a share of every"
        " expert; for models with experts.",
    )
    one_shot_all_reduce: bool = Field(
        True,
        description="Use a one-shot all-reduce over symmetric memory for small sums on GPUs of one host, where a"
        " comparison at the start finds it faster than NCCL; off: always NCCL.",
    )
    dtype: Dtype = Field(
        "auto", description="Type of weights and KV cache; auto is float32 on a CPU, else the type on file."
    )
    quantization: Quantization = Field(
        "none",
        description="none: weights are kept as the checkpoint has them, FP8 or not; fp8: those of 16 or 32 bits become"
        " FP8 while they are loaded, a scale for each row, and inputs are rounded to FP8 token by token. The head and"
        " drafts that read hidden states stay as they are.",
    )
    model_impl: ModelImplementation = Field(
        "auto",
        description="Whose code computes the model. native: ours; transformers: that of transformers with our"
        " attention, norms and products; auto: native where the family is supported (docs/models.md),"
        " else transformers.",
    )
    batch_invariant: BatchInvariant = Field(
        "off",
        description="Whether a token's logits have the same bits in any batch, chunking and draft. on: or the service"
        " does not start; auto: where decoding was measured to cost about as much, which is one GPU of compute"
        " capability 9.0 (H100, H200) in 16 bits, dense models with a hidden size above 2,048 and compared heads of up"
        " to 128, whose long prompts take a seventh longer; off: near ties may fall differently as the batch changes.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="Type of keys and values in the cache. model: that of the model; fp8: FP8 (E4M3), twice the"
        " tokens in the same memory, which changes what the model says a little; auto: fp8 where the checkpoint asks"
        " for it. Drafts that read hidden states keep their type.",
    )
    kv_cache_scales: KVCacheScales = Field(
        "checkpoint",
        description="Scales of an FP8 cache. checkpoint: its own, else 1; measured: from a thousand tokens at load.",
    )
    page_size: Positive = Field(16, description="Tokens in a KV page.")
    num_pages: Positive | None = Field(
        None, description="KV pages; unset: as many as kv_cache_bytes holds, else as a share of the free memory does."
    )
    kv_cache_bytes: Positive | None = Field(
        None, description="Bytes for the KV cache, on each rank; not together with num_pages."
    )
    gpu_memory_utilization: Share | None = Field(
        None,
        description="Share of its GPU's memory that weights, CUDA graphs and KV cache may take together; unset: 0.85"
        " of what is free once the first two have theirs. Not together with num_pages or kv_cache_bytes.",
    )
    prefix_caching: bool = Field(
        True,
        description="Start a session after the KV pages of its prompt that are in the prefix cache, instead of"
        " computing them again.",
    )
    state_snapshot_interval: Positive = Field(
        1024,
        description="Tokens between the states of recurrent layers (Gated DeltaNet) that prefix caching keeps of a"
        " session, besides that at the end of its prompt; a cached prompt continues from the last of them.",
    )
    max_batched_tokens: Positive | None = Field(
        None,
        description="Maximum number of tokens in one forward; longer prompts are split into chunks. Unset: 4,096 on a"
        " GPU, 1,024 on a CPU.",
    )
    max_mixed_prefill_tokens: Positive = Field(
        256,
        description="Maximum number of prompt tokens in a forward that also decodes running sessions, which wait for"
        " it; on a GPU up to four times as many where more prompts wait than sessions run.",
    )
    max_running_requests: Positive = Field(
        256,
        description="Requests that run at the same time: the KV cache and CUDA graphs are made for them, and more"
        " are served without graphs. outrider serve takes the coordinator's.",
    )
    num_speculative_tokens: DraftLength = Field(
        16,
        description="Draft tokens in a step, at most: CUDA graphs are made for them, and more are served without."
        " outrider serve takes the coordinator's.",
    )
    cuda_graph_max_tokens: Positive = Field(
        1024,
        description="Tokens of a forward up to which CUDA graphs are captured; larger forwards take longer than"
        " launching them.",
    )
    cuda_graph_memory_mb: NonNegative | None = Field(
        None,
        description="Maximum memory of CUDA graphs, in MiB; the largest forwards are left out first, 0 captures none."
        " Unset: a 24th of the GPU's memory, 2048 at most.",
    )
    cuda_graph_capture_s: PositiveSeconds | None = Field(
        None,
        description="Time for the capture of CUDA graphs at start, about: forwards that do not fit it are left out, the"
        " largest first. Unset: no limit.",
    )
    cost_profile_s: Seconds = Field(
        2.0,
        description="Time for measuring the durations of steps at start, about; coordinators choose draft lengths by"
        " them. 0: not measured.",
    )
    num_threads: Positive | None = Field(None, description="Threads that compute on a CPU; unset: one for each core.")
    num_pinned_cpus: NonNegative | None = Field(
        None,
        description="CPUs that this process is pinned to and keeps from idling while it has sessions: lower"
        " latency for processor time. Unset: 1 with a GPU, on hosts with 8 processors or more and no quota; 0 in pods.",
    )
    tls_cert_file: Text | None = TLS_CERT_FILE
    tls_key_file: Text | None = TLS_KEY_FILE
    tls_client_ca_file: Text | None = TLS_CLIENT_CA_FILE
    link_token_file: Text | None = Field(
        None, description="Bearer tokens, one a line; coordinators must send one of them. Unset: no token is required."
    )
    link_timeout_ms: Positive = Field(
        15_000,
        description="Time without any message from a coordinator, heartbeats included, after which its sessions are"
        " released.",
    )
    max_sessions_per_link: Positive = Field(
        1024,
        description="Maximum number of open sessions of a coordinator; more are refused. Not below its"
        " max_running_requests.",
    )
    session_idle_timeout_s: PositiveSeconds = Field(
        60.0,
        description="Time without a command after which a session releases its KV pages; a coordinator that continues"
        " it opens it again.",
    )
    health_port: Port | None = HEALTH_PORT
    health_host: Host | None = HEALTH_HOST
    drain_delay_s: Seconds = DRAIN_DELAY_S
    drain_grace_s: Seconds = DRAIN_GRACE_S
    hang_timeout_s: Seconds = HANG_TIMEOUT_S
    metrics_port: Port | None = METRICS_PORT
    metrics_host: Host | None = METRICS_HOST
    trace_file: Text | None = TRACE_FILE
    log_level: LogLevel = LOG_LEVEL
    log_interval_s: Seconds = LOG_INTERVAL_S

    @model_validator(mode="after")
    def _one_cache_size(self) -> Self:
        """``ValueError`` if the size of the KV cache is given in two ways."""
        sizes = ("num_pages", "kv_cache_bytes", "gpu_memory_utilization")
        chosen = [name for name in sizes if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]}: is set together with {chosen[1]}; one of them decides")
        if self.gpu_memory_utilization is not None and self.device == "cpu":
            raise ValueError("gpu_memory_utilization: is set, and the device is cpu: give kv_cache_bytes there")
        return self

    @model_validator(mode="after")
    def _scales_of_fp8(self) -> Self:
        """``ValueError`` if scales are to be measured that the KV cache has not."""
        if self.kv_cache_scales == "measured" and self.kv_cache_dtype != "fp8":
            raise ValueError(f"kv_cache_scales: is measured, and kv_cache_dtype is {self.kv_cache_dtype}, not fp8")
        return self

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        check_tls(self)
        return self


def max_batched_tokens(setting: int | None, *, is_gpu: bool) -> int:
    """The setting, or the device's default: on a GPU large chunks spare the pauses between smaller ones, on a CPU a
    short prompt would wait long for another one's large chunk.
    """
    if setting is not None:
        return setting
    return 4096 if is_gpu else 1024
