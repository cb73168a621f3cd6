"""Readings, their way into Prometheus' text, and the line that a busy process logs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import urllib.request

import pytest

from outrider.config import DraftSettings
from outrider.errors import ConfigError
from outrider.readings import Histogram, Reading, each
from outrider.telemetry.logs import JsonFormatter, records_about
from outrider.telemetry.metrics.catalogue import CATALOGUE, MetricKind, find
from outrider.telemetry.metrics.endpoint import MetricsEndpoint
from outrider.telemetry.metrics.serving import metrics_served
from outrider.telemetry.metrics.vllm_names import VLLM_NAMES
from outrider.telemetry.stats_logger import Window, coordinator_fields, log_stats, service_fields

DEADLINE_S = 240.0


def scrape(readings: list[Reading], role: str = "draft", *, vllm_names: bool = False) -> str:
    endpoint = MetricsEndpoint(lambda: readings, role=role, host="127.0.0.1", port=0, vllm_names=vllm_names)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())
    finally:
        endpoint.close()


def test_a_histogram_counts_what_is_at_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    reading = histogram.read()
    assert (reading.counts, reading.count, reading.total) == ((2, 2, 1), 5, 14.0)


def test_readings_become_text_with_cumulative_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 9.0):
        histogram.observe(value)
    text = scrape(
        [
            Reading("outrider_forward_batch_size", histogram.read()),
            Reading("outrider_kv_pages_free", 7),
            *each("outrider_sessions_refused_total", "reason", [("no_room", 3), ("ending", 0)]),
        ]
    )
    for line in (
        'outrider_forward_batch_size_bucket{le="1",role="draft"} 1.0',
        'outrider_forward_batch_size_bucket{le="2",role="draft"} 2.0',
        'outrider_forward_batch_size_bucket{le="+Inf",role="draft"} 3.0',
        'outrider_forward_batch_size_sum{role="draft"} 11.0',
        'outrider_kv_pages_free{role="draft"} 7.0',
        'outrider_sessions_refused_total{reason="no_room",role="draft"} 3.0',
        "# TYPE outrider_sessions_refused_total counter",
    ):
        assert line in text, text
    assert "process_cpu_seconds_total" in text


MODEL = Reading("outrider_build_info", 1, (("version", "1"), ("commit", ""), ("model", "llama")))


def test_metrics_have_vllms_names_too_where_asked_for() -> None:
    waits = Histogram((1.0,))
    waits.observe(0.5)
    readings = [
        MODEL,
        Reading("outrider_num_requests_waiting", 3),
        Reading("outrider_kv_cache_usage_perc", 0.25),
        Reading("outrider_time_to_first_token_seconds", waits.read()),
        *each("outrider_requests_total", "outcome", [("stop", 5), ("cancelled", 2), ("deadline", 1), ("failed", 0)]),
        *each("outrider_spec_decode_num_accepted_tokens_per_pos_total", "position", [("0", 9), ("1", 4)]),
        Reading("outrider_steps_total", 7),
    ]
    text = scrape(readings, "coordinator", vllm_names=True)
    own = 'engine="0",model_name="llama"'
    for line in (
        f"vllm:num_requests_waiting{{{own}}} 3.0",
        f"vllm:kv_cache_usage_perc{{{own}}} 0.25",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="1",model_name="llama"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="llama"} 3.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="llama"} 5.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="1"}} 4.0',
        "# TYPE vllm:request_success_total counter",
        "outrider_num_requests_waiting 3.0",
    ):
        assert f"\n{line}\n" in text, line
    assert "vllm:steps" not in text
    assert "vllm:" not in scrape(readings, "coordinator")
    # A draft is no second model.
    assert "vllm:" not in scrape([MODEL, Reading("outrider_kv_cache_usage_perc", 0.5)], "draft", vllm_names=True)


def test_vllms_names_stand_for_metrics_of_that_process() -> None:
    for role, names in VLLM_NAMES.items():
        for name, vllm in names.items():
            spec = find(name)
            assert role in spec.roles
            assert set(vllm.labels) == {label.name for label in spec.labels} - {"role"}
            assert vllm.name.startswith("vllm:")
            assert not vllm.name.endswith("_total")


def test_names_follow_the_conventions() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(set(names)) == len(names)
    for spec in CATALOGUE:
        assert spec.name.startswith("outrider_")
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert spec.text.endswith(".")
        assert spec.promql


def test_without_a_port_nothing_is_imported() -> None:
    code = """
import sys
import outrider_coordinator.__main__, outrider_draft.__main__, outrider.process.hosting
assert not {name for name in sys.modules if name.startswith("prometheus_client")}
"""
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert outcome.returncode == 0, outcome.stderr


def test_a_port_in_use_is_told_by_its_setting() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        settings = DraftSettings.model_validate({"method": "ngram", "metrics_port": listener.getsockname()[1]})
        with (
            pytest.raises(ConfigError, match=r"metrics_port: 127\.0\.0\.1:\d+ is in use"),
            metrics_served(settings, list),
        ):
            raise AssertionError("it listens")


def test_a_missing_library_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.telemetry.metrics.endpoint", None)
    settings = DraftSettings.model_validate({"method": "ngram", "metrics_port": 9})
    with pytest.raises(ConfigError, match=r"\[telemetry\]"), metrics_served(settings, list):
        raise AssertionError("it listens")


def coordinator_readings(steps: int, *, with_draft: bool) -> list[Reading]:
    prefill, decode, drafts = Histogram((1.0,)), Histogram((1.0,)), steps if with_draft else 0
    for step in range(steps):
        (decode if step % 5 else prefill).observe(0.004 if step % 5 else 0.25)
    prefix = "outrider_spec_decode_num_"
    return [
        Reading("outrider_steps_total", steps),
        Reading(f"{prefix}drafts_total", drafts),
        Reading(f"{prefix}draft_tokens_total", 4 * drafts),
        Reading(f"{prefix}accepted_tokens_total", 3 * drafts),
        Reading(f"{prefix}emitted_tokens_total", steps + 3 * drafts),
        Reading("outrider_num_requests_running", 2),
        Reading("outrider_step_stage_seconds", prefill.read(), (("phase", "prefill"), ("stage", "score"))),
        Reading("outrider_step_stage_seconds", decode.read(), (("phase", "decode"), ("stage", "score"))),
        *each("outrider_steps_without_draft_total", "reason", [("late", steps - drafts), ("load", 0)]),
    ]


def test_a_busy_coordinator_says_what_is_new_since_the_last_line() -> None:
    window = Window(coordinator_readings(10, with_draft=True), coordinator_readings(30, with_draft=True), 2.0)
    fields = coordinator_fields(window)
    assert fields is not None
    assert (fields["tokens_per_s"], fields["acceptance_rate"], fields["mean_acceptance_length"]) == (40.0, 0.75, 4.0)
    assert (fields["running"], fields["prefill_score_ms"], fields["decode_score_ms"]) == (2, 250.0, 4.0)
    assert "without_draft" not in fields
    assert not {"prefill_draft_ms", "decode_draft_ms"} & fields.keys()


def test_without_drafts_it_says_why_and_no_acceptance() -> None:
    fields = coordinator_fields(Window([], coordinator_readings(10, with_draft=False), 2.0))
    assert fields is not None
    assert "acceptance_rate" not in fields
    assert fields["without_draft"] == "late:10"


def test_an_idle_process_says_nothing() -> None:
    readings = coordinator_readings(10, with_draft=True)
    assert coordinator_fields(Window(readings, readings, 5.0)) is None
    assert service_fields(Window([], [], 5.0)) is None


async def test_the_beat_logs_one_line_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.telemetry.stats_logger")  # others log meanwhile
    numbers = iter(range(1, 1000))
    logging_task = asyncio.create_task(
        log_stats(0.001, lambda: coordinator_readings(next(numbers), with_draft=True), coordinator_fields)
    )
    async with asyncio.timeout(DEADLINE_S):
        while not caplog.records:
            await asyncio.sleep(0.001)
    logging_task.cancel()
    entry = json.loads(JsonFormatter("coordinator").format(caplog.records[0]))
    assert (entry["message"], entry["acceptance_rate"]) == ("busy", 0.75)


async def test_an_interval_of_0_is_never() -> None:
    await asyncio.wait_for(log_stats(0, list, coordinator_fields), DEADLINE_S)


def test_lines_about_a_request_bear_its_ids() -> None:
    record = logging.LogRecord("outrider", logging.INFO, "", 0, "failed", None, None)
    with records_about({"request_id": "r-1", "trace_id": "abc"}):
        entry = json.loads(JsonFormatter("coordinator").format(record))
    assert (entry["request_id"], entry["trace_id"]) == ("r-1", "abc")
    assert "request_id" not in json.loads(JsonFormatter("coordinator").format(record))
