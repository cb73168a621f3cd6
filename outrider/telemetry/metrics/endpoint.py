"""Metrics endpoint: a registry that is filled from readings at every scrape.

Converts readings to Prometheus' text format and serves it in a thread. The source of the readings is a parameter. The
only module that imports ``prometheus_client``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.addresses import listening_error, listening_socket
from outrider.readings import HistogramReading, Reading
from outrider.telemetry.http_server import HttpServer
from outrider.telemetry.metrics.catalogue import CATALOGUE, Label, MetricKind, MetricSpec, find
from outrider.telemetry.metrics.vllm_names import vllm_readings

Read = Callable[[], Iterable[Reading]]


def make_metrics_app(read: Read, *, role: str, vllm_names: bool = False) -> Any:  # noqa: ANN401 - of prometheus_client
    """ASGI application that answers a scrape with the readings of ``read`` and of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingsCollector(read, role, vllm_names=vllm_names))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return make_asgi_app(registry)


class MetricsEndpoint:
    """Serves ``/metrics`` until it is closed."""

    def __init__(self, read: Read, *, role: str, host: str, port: int, vllm_names: bool = False) -> None:
        """``read`` is called at every scrape, in a thread of the server's; ``role`` is that label's value.

        ``vllm_names`` gives metrics under vLLM's names besides. ``ConfigError`` when the port is taken.
        """
        self._app = make_metrics_app(read, role=role, vllm_names=vllm_names)
        try:
            self._socket = listening_socket(host, port)
        except OSError as error:
            raise listening_error(
                host, port, error, port_setting="metrics_port", host_setting="metrics_host"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        server = HttpServer(self._app)
        try:
            self._loop.run_until_complete(server.start(self._socket))
            self._loop.run_forever()
            server.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class ReadingsCollector(Collector):
    """Readings as metric families, in the order of the catalogue."""

    def __init__(self, read: Read, role: str, *, vllm_names: bool = False) -> None:
        self._read, self._role, self._vllm_names = read, role, vllm_names

    def collect(self) -> Iterator[Metric]:
        """All families that have a value."""
        order = {spec.name: place for place, spec in enumerate(CATALOGUE)}
        readings = sorted(self._read(), key=lambda reading: order[find(reading.name).name])
        for name, of_name in groupby(readings, key=lambda reading: reading.name):
            yield self._family(find(name), list(of_name))
        if self._vllm_names:
            for name, renamed in vllm_readings(readings, self._role).items():
                labels = tuple(Label(label, "") for label, _ in renamed[0].labels)
                yield _family(replace(find(name), name=renamed[0].name, labels=labels), renamed)

    def _family(self, spec: MetricSpec, readings: list[Reading]) -> Metric:
        if any(label.name == "role" for label in spec.labels):
            readings = [replace(reading, labels=(("role", self._role), *reading.labels)) for reading in readings]
        return _family(spec, readings)


def _family(spec: MetricSpec, readings: list[Reading]) -> Metric:
    labels = [label.name for label in spec.labels]
    if spec.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(spec.name, spec.text, labels=labels)
        for reading in readings:
            histogram.add_metric(_values(spec, reading), *_buckets(reading))
        return histogram
    make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = make(spec.name, spec.text, labels=labels)
    for reading in readings:
        if isinstance(reading.value, HistogramReading):
            raise TypeError(f"{spec.name} is a {spec.kind.value}, and was read as a histogram")
        family.add_metric(_values(spec, reading), float(reading.value))
    return family


def _buckets(reading: Reading) -> tuple[list[tuple[str, float]], float]:
    if not isinstance(reading.value, HistogramReading):
        raise TypeError(f"{reading.name} is a histogram, and was read as a number")
    bounds = [*(f"{bound:g}" for bound in reading.value.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(reading.value.counts)), strict=True)), reading.value.total


def _values(spec: MetricSpec, reading: Reading) -> list[str]:
    given = dict(reading.labels)
    if set(given) != {label.name for label in spec.labels}:
        raise TypeError(f"{spec.name} was read with the labels {sorted(given)}")
    return [given[label.name] for label in spec.labels]
