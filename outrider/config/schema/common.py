"""Fields that several sections of the schema share, and checks of fields that go together."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from outrider.config.fields import (
    Host,
    LogLevel,
    Port,
    Positive,
    Seconds,
    Text,
)
from outrider.open_requests import DEFAULT_MAX_BYTES
from outrider.stalls import DEFAULT_HANG_TIMEOUT_S

HOST: Host = Field(
    "127.0.0.1",
    description="Address to listen on; 0.0.0.0 is every interface, :: with IPv6 too, unix:/path is a socket file.",
)
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
HEALTH_PORT: Port | None = Field(
    None, description="Port of the health service over HTTP: /livez, /readyz, /startupz; unset: over gRPC only."
)
HEALTH_HOST: Host | None = Field(
    None, description="Address that health_port listens on; unset: host, or 127.0.0.1 where that is a socket file."
)
DRAIN_DELAY_S: Seconds = Field(
    1.0, description="Time after SIGTERM in which health says NOT_SERVING and calls are still accepted."
)
HANG_TIMEOUT_S: Seconds = Field(
    DEFAULT_HANG_TIMEOUT_S,
    description="Time without progress although there is work, after which the process writes the stacks of its threads"
    " and ends, to be started again; longer while forwards are known to take long, and 30 times as long while a model"
    " loads and warms up. 0: never.",
)
DRAIN_GRACE_S: Seconds = Field(30.0, description="Time after that in which running streams may finish.")
METRICS_PORT: Port | None = Field(
    None, description="Port of metrics for Prometheus over HTTP, at /metrics; unset: metrics are not served."
)
METRICS_HOST: Host | None = Field(
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
MAX_OPEN_REQUEST_BYTES: Positive = Field(
    DEFAULT_MAX_BYTES,
    description="Most bytes of the requests that are being read and tokenized at the same time; one that would have"
    " more than half of what the others leave is refused, with a retry delay.",
)
LOG_LEVEL: LogLevel = Field("info", description="Lowest level that is logged: debug, info, warning or error.")


class Section(BaseModel):
    """The settings of one process."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: ClassVar[str]
    """The section's key in a file, and its part of a variable's name."""


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
