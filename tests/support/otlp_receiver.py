"""An OTLP receiver for tests: every span that anybody exports over gRPC, as it came."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from outrider.telemetry.tracing.span import Span
from outrider.transport.otlp import spans_from_proto


class OtlpReceiver(TraceServiceServicer):
    """Listens inside its ``with``; ``environment`` makes a process send its spans here."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._server, self.port = self._listening(0)

    @property
    def environment(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Inside, its port is another's to take, and so is what is sent there."""
        self._server.stop(None).wait()
        try:
            yield
        finally:
            self._server, self.port = self._listening(self.port)
            self._server.start()

    def Export(self, request: Any, context: object) -> Any:
        with self._lock:
            self._spans.extend(spans_from_proto(request))
        return pb.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None)

    def _listening(self, port: int) -> tuple[grpc.Server, int]:
        server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_TraceServiceServicer_to_server(self, server)
        return server, server.add_insecure_port(f"127.0.0.1:{port}")
