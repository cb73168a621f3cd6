"""Settings of the gateway."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    AddressList,
    Host,
    LogLevel,
    NumProcesses,
    Port,
    Positive,
    ReasoningParser,
    RootPath,
    Seconds,
    Text,
    TextList,
    ToolCallParser,
)
from outrider.config.schema.common import (
    DRAIN_DELAY_S,
    DRAIN_GRACE_S,
    HANG_TIMEOUT_S,
    LOG_LEVEL,
    MAX_OPEN_REQUEST_BYTES,
    METRICS_HOST,
    METRICS_PORT,
    TLS_CLIENT_CA_FILE,
    TLS_KEY_FILE,
    TRACE_FILE,
    Section,
    check_both,
    check_tls,
)


class GatewaySettings(Section):
    """``outrider gateway``: the OpenAI-compatible HTTP API."""

    name: ClassVar[str] = "gateway"

    enabled: bool = Field(True, description="Whether outrider serve starts it.")
    num_processes: NumProcesses = Field(
        1,
        description="Processes that outrider serve starts of it, at most 64, on one port: the kernel spreads"
        " connections.",
    )
    host: Host = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 is every interface, :: with IPv6 too. Unset, outrider serve takes"
        " the coordinator's.",
    )
    port: Port = Field(8000, description="Port to listen on.")
    reuse_port: bool = Field(False, description="Let other gateways of this host listen on the same port too.")
    coordinator_address: AddressList = Field(
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
    tls_key_file: Text | None = TLS_KEY_FILE
    tls_client_ca_file: Text | None = TLS_CLIENT_CA_FILE
    root_path: RootPath | None = Field(
        None,
        description="Path before all endpoints, for a proxy that does not cut it off; they are served without it too.",
    )
    allowed_origins: TextList = Field(
        None,
        description="Origins whose pages may call the API in a browser (CORS), with commas; * is any. Unset: none.",
    )
    allowed_methods: TextList = Field("*", description="Methods that such pages may use.")
    allowed_headers: TextList = Field("*", description="Headers that such pages may send.")
    allow_credentials: bool = Field(False, description="Whether such pages may send cookies and the like.")
    tool_call_parser: ToolCallParser | None = Field(
        None,
        description="Form in which the model writes tool calls, by vLLM's names; none: they stay text. Unset: that of"
        " the chat template, where it shows one.",
    )
    reasoning_parser: ReasoningParser | None = Field(
        None,
        description="Form in which the model writes its reasoning, by vLLM's names; none: it stays part of the content."
        " Unset: that of the chat template, where it shows one.",
    )
    max_body_bytes: Positive = Field(8 << 20, description="Most bytes of a request's body.")
    max_open_request_bytes: Positive = MAX_OPEN_REQUEST_BYTES
    resume_timeout_s: Seconds = Field(
        30.0,
        description="How long a stream may wait, after its coordinator went away, until one takes it up again without a"
        " lost or repeated token; 0: it ends with an error at once.",
    )
    drain_delay_s: Seconds = DRAIN_DELAY_S
    drain_grace_s: Seconds = DRAIN_GRACE_S
    hang_timeout_s: Seconds = HANG_TIMEOUT_S
    metrics_port: Port | None = METRICS_PORT
    metrics_host: Host | None = METRICS_HOST
    trace_file: Text | None = TRACE_FILE
    log_level: LogLevel = LOG_LEVEL

    @model_validator(mode="after")
    def _secure(self) -> Self:
        check_tls(self)
        check_both(self, "coordinator_tls_cert_file", "coordinator_tls_key_file")
        return self
