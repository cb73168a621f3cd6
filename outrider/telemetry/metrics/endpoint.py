"""Metrics over HTTP: a registry of its own, filled from readings at every scrape.

Owns the way from readings to Prometheus' text and the server that gives it out, in a thread of its own. Refuses to
know where the readings come from. The only importer of ``prometheus_client``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, groupby
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.errors import ConfigError
from outrider.readings import HistogramReading, Reading
from outrider.telemetry.metrics.catalogue import CATALOGUE, Kind, MetricSpec, find

Read = Callable[[], Iterable[Reading]]


class MetricsEndpoint:
    """Serves ``/metrics`` until it is closed."""

    def __init__(self, read: Read, *, role: str, host: str, port: int) -> None:
        """``read`` is called at every scrape, in a thread of the server's; ``role`` is that label's value.

        ``ConfigError`` when the port is taken.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ReadingsCollector(read, role))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError("metrics_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error

    @property
    def port(self) -> int:
        """Where it listens."""
        server: WSGIServer = self._server
        return int(server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        thread: threading.Thread = self._thread
        thread.join()


class ReadingsCollector(Collector):
    """Readings as metric families, in the catalogue's order."""

    def __init__(self, read: Read, role: str) -> None:
        self._read, self._role = read, role

    def collect(self) -> Iterator[Metric]:
        """All families that have a figure now."""
        order = {spec.name: place for place, spec in enumerate(CATALOGUE)}
        readings = sorted(self._read(), key=lambda reading: order[find(reading.name).name])
        for name, of_name in groupby(readings, key=lambda reading: reading.name):
            yield self._family(find(name), list(of_name))

    def _family(self, spec: MetricSpec, readings: list[Reading]) -> Metric:
        if any(label.name == "role" for label in spec.labels):
            readings = [replace(reading, labels=(("role", self._role), *reading.labels)) for reading in readings]
        return _family(spec, readings)


def _family(spec: MetricSpec, readings: list[Reading]) -> Metric:
    labels = [label.name for label in spec.labels]
    if spec.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(spec.name, spec.text, labels=labels)
        for reading in readings:
            histogram.add_metric(_values(spec, reading), *_buckets(reading))
        return histogram
    make = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
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
