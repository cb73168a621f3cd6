"""The block of text that users of `vllm bench serve` know, with our lines after it. Knows no measuring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.benchmarks.samples import Statistics
from outrider.benchmarks.schema import Series
from outrider.benchmarks.serving.figures import STAGES
from outrider.benchmarks.serving.workload import Traffic

_WIDTH, _NAME, _VALUE = 50, 40, 10
_LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def format_block(figures: Mapping[str, Any], traffic: Traffic, series: Sequence[Series], title: str) -> str:
    """The whole block of one arm."""
    lines = [_centred(f" {title} ", "="), *_general(figures, traffic)]
    for name, short, long in _LATENCIES:
        lines += [_centred(long, "-"), *(_line(*row) for row in _latency(figures, name, short))]
    lines += _speculation(figures) + _users(series) + _steps(series)
    return "\n".join([*lines, "=" * _WIDTH])


def _general(figures: Mapping[str, Any], traffic: Traffic) -> list[str]:
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
    ]
    if traffic.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", traffic.max_concurrency))
    if not math.isinf(traffic.request_rate):
        rows.append(("Request rate configured (RPS):", traffic.request_rate))
    rows += [
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", float(figures["max_output_tokens_per_s"])),
        ("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
        ("Busiest client process (% of a core):", 100 * figures["outrider_client_load"]),
    ]
    return [_line(*row) for row in rows]


def _latency(figures: Mapping[str, Any], name: str, short: str) -> list[tuple[str, float | None]]:
    kinds = (("mean", "Mean"), ("median", "Median"), ("p99", "P99"))
    return [(f"{label} {short} (ms):", figures[f"{kind}_{name}_ms"]) for kind, label in kinds]


def _speculation(figures: Mapping[str, Any]) -> list[str]:
    if "spec_decode_num_drafts" not in figures:
        return []
    rows: list[tuple[str, Any]] = [
        ("Acceptance rate (%):", figures["spec_decode_acceptance_rate"]),
        ("Acceptance length:", figures["spec_decode_acceptance_length"]),
        ("Drafts:", figures["spec_decode_num_drafts"]),
        ("Draft tokens:", figures["spec_decode_draft_tokens"]),
        ("Accepted tokens:", figures["spec_decode_accepted_tokens"]),
        ("Acceptance of judged tokens (%):", _percent(figures["outrider_acceptance"])),
    ]
    lines = [_centred("Speculative Decoding", "-"), *(_line(*row) for row in rows)]
    lines.append("Per-position acceptance (%):")
    rates = figures["spec_decode_per_position_acceptance_rates"]
    return lines + [_line(f"  Position {position}:", 100 * rate) for position, rate in enumerate(rates)]


def _users(series: Sequence[Series]) -> list[str]:
    found = _statistics(series, "user_throughput")
    if found is None:
        return []
    return [
        _centred("Tokens per second of one user", "-"),
        _line("Median (tok/s):", found.median),
        _line("Slowest (tok/s):", found.minimum),
        _line("Until all finished (ms per token):", _median(series, "until_all_finished")),
        *_after_first_tokens(series),
    ]


def _after_first_tokens(series: Sequence[Series]) -> list[str]:
    value = _median(series, "after_first_tokens")
    return [] if value is None else [_line("After the first tokens (ms per token):", value)]


def _steps(series: Sequence[Series]) -> list[str]:
    """Medians over requests: of the prefill, and of each one's mean decode step."""
    lines: list[str] = []
    for part, title in (("prefill", "Time of the prefill by stage"), ("decode", "Time of a decode step by stage")):
        found = [(stage, _statistics(series, f"{part}_{stage}")) for stage in (*STAGES, "total")]
        rows = [_line(f"{stage.capitalize()} (ms):", item.median) for stage, item in found if item is not None]
        lines += [_centred(title, "-"), *rows] if rows else []
    return lines


def _statistics(series: Sequence[Series], name: str) -> Statistics | None:
    return next((item.statistics for item in series if item.name == name), None)


def _median(series: Sequence[Series], name: str) -> float | None:
    found = _statistics(series, name)
    return None if found is None else found.median


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _centred(text: str, filler: str) -> str:
    return f"{text:{filler}^{_WIDTH}}"


def _line(name: str, value: float | None) -> str:
    shown = "no data" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<{_NAME}} {shown:<{_VALUE}}".rstrip()
