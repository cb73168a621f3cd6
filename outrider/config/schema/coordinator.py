"""Settings of the coordinator."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    Acceptance,
    AddressList,
    Defaults,
    DraftAhead,
    DraftLength,
    DraftLengthMode,
    GenerationConfig,
    Host,
    LogLevel,
    Logprobs,
    MaxLogprobs,
    NonNegative,
    NonNegativeFloat,
    NumProcesses,
    Port,
    Positive,
    PositiveSeconds,
    RejectionSampleMethod,
    SchedulingPolicy,
    Seconds,
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
    MAX_OPEN_REQUEST_BYTES,
    METRICS_HOST,
    METRICS_PORT,
    TLS_CERT_FILE,
    TLS_CLIENT_CA_FILE,
    TLS_KEY_FILE,
    TRACE_FILE,
    VLLM_METRIC_NAMES,
    Section,
    check_both,
    check_tls,
)
from outrider.types import AcceptanceMethod, LogprobsMode


class CoordinatorSettings(Section):
    """``outrider coordinator``: the public service."""

    name: ClassVar[str] = "coordinator"

    host: Host = HOST
    port: Port = Field(50050, description="Port to listen on.")
    num_processes: NumProcesses = Field(
        1,
        description="Processes that outrider serve starts of it, at most 64, on one port: the kernel spreads"
        " connections. Limits, queue, prefix affinity and draft lengths are of each process.",
    )
    reuse_port: bool = Field(False, description="Let other coordinators of this host listen on the same port too.")
    own_port: Port | None = Field(
        None, description="A further port to listen on, of this process alone where others share the first."
    )
    target_address: AddressList = Field(
        "127.0.0.1:50051",
        description="Addresses of the targets: host:port or unix:/path, separated by commas; each address of a host"
        " is one target.",
    )
    draft_address: AddressList | None = Field(
        None, description="Addresses of the drafts, likewise; unset: no speculation."
    )
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
    trusted_drafts: bool = Field(
        True,
        description="Off: drafts propose for greedy and coupled requests alone, whose output no draft can change. Under"
        " rejection and typical acceptance a draft that lies about its probabilities can prefer tokens unseen.",
    )
    rejection_sample_method: RejectionSampleMethod = Field(
        RejectionSampleMethod.STANDARD,
        description="Rejection: standard judges draft tokens one after the other, block all of a step together"
        " (block verification), which keeps as many or more of them on average. Exact with either.",
    )
    posterior_threshold: NonNegativeFloat = Field(0.09, description="Typical acceptance: the fixed threshold.")
    posterior_alpha: NonNegativeFloat = Field(0.3, description="Typical acceptance: the factor of the entropy.")
    disable_by_batch_size: NonNegative = Field(
        0,
        description="Number of running and waiting requests from which on nothing is speculated, until there are"
        " fewer; 0: no limit. Draft lengths then depend on the load.",
    )
    draft_timeout_ms: Positive = Field(
        1000,
        description="Maximum time that a step waits for a proposal before it continues without; half of it for a"
        " draft that"
        " usually answers quickly, and no wait while it does not answer at all.",
    )
    direct_proposals: bool = Field(
        True,
        description="A draft sends its proposals to a target of the same host directly too, so that scoring begins"
        " sooner; off: they go through the coordinator alone.",
    )
    channels_between_hosts: bool = Field(
        False, description="direct_proposals between hosts and pods too: drafts call their targets' port."
    )
    draft_ahead: DraftAhead = Field(
        DraftAhead.VERDICT,
        description="What a draft computes before the coordinator asks for it, where its proposals go to the target"
        " directly. in_turn: nothing; verdict: the next proposals of greedy and coupled requests, once the target's"
        " verdict has come directly too; chain: draft and target both go on by themselves, under rejection the draft"
        " alone, unless both models share a GPU; it pays for few users, where a draft's loop takes less time than"
        " the target's forward; auto: verdict or chain, whichever has served a target's users sooner.",
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
    scheduling_policy: SchedulingPolicy = Field(
        SchedulingPolicy.FCFS,
        description="Order of waiting requests. fcfs: that of arrival; priority: by priority, which any caller may set,"
        " lower ones first.",
    )
    max_open_request_bytes: Positive = MAX_OPEN_REQUEST_BYTES
    max_stream_messages_per_s: NonNegative = Field(
        10_000,
        description="Maximum number of messages a second of all streams of this process; while its thread is busy,"
        " fewer, but 2,500 at least. Tokens of several steps go in one then. First tokens and results do not"
        " count. 0: any.",
    )
    num_pinned_cpus: NonNegative | None = Field(
        None,
        description="CPUs that this process is pinned to and keeps from idling while requests run: lower latency for"
        " processor time. Unset: 1 on hosts with 8 processors or more and no quota; 0 in pods.",
    )
    tokenizer: Text | None = Field(
        None, description="Folder of a tokenizer that replaces the target's, or its id on the Hub."
    )
    tokenizer_revision: Text | None = Field(
        None, description="Branch, tag or commit of a tokenizer on the Hugging Face Hub; unset: main."
    )
    chat_template: Text | None = Field(
        None, description="File with a chat template (Jinja) that replaces the model's templates."
    )
    generation_config: Defaults = Field(
        GenerationConfig.AUTO,
        description="auto: temperature, top_p, top_k, min_p, repetition_penalty and max_tokens that a request leaves"
        " out are those of the target's generation_config.json; none: they are off.",
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
    tls_cert_file: Text | None = TLS_CERT_FILE
    tls_key_file: Text | None = TLS_KEY_FILE
    tls_client_ca_file: Text | None = TLS_CLIENT_CA_FILE
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
    health_port: Port | None = HEALTH_PORT
    health_host: Host | None = HEALTH_HOST
    drain_delay_s: Seconds = DRAIN_DELAY_S
    drain_grace_s: Seconds = DRAIN_GRACE_S
    hang_timeout_s: Seconds = HANG_TIMEOUT_S
    metrics_port: Port | None = METRICS_PORT
    metrics_host: Host | None = METRICS_HOST
    vllm_metric_names: bool = VLLM_METRIC_NAMES
    max_traced_steps: NonNegative = Field(
        256, description="Steps of a traced request with a span of their own; further steps are counted."
    )
    trace_file: Text | None = TRACE_FILE
    log_level: LogLevel = LOG_LEVEL
    log_interval_s: Seconds = LOG_INTERVAL_S

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.channels_between_hosts and not self.direct_proposals:
            raise ValueError("channels_between_hosts: needs direct_proposals, which is off")
        check_tls(self)
        for key in ("link_tls_cert_file", "link_tls_key_file", "link_tls_server_name"):
            if getattr(self, key) is not None and self.link_tls_ca_file is None:
                raise ValueError(f"link_tls_ca_file: is needed with {key}: links speak TLS when it is set")
        check_both(self, "link_tls_cert_file", "link_tls_key_file")
        return self
