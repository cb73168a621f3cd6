"""Stats logger: a line every few seconds while a process is busy, with throughput and stage times.

A line is computed from the difference between two readings of the metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import product

from outrider.readings import HistogramReading, Reading

_log = logging.getLogger(__name__)

Fields = dict[str, object]


class Window:
    """Differences between two readings."""

    def __init__(self, before: Iterable[Reading], after: Iterable[Reading], seconds: float) -> None:
        self._before, self._after = _by_key(before), _by_key(after)
        self._seconds = seconds

    def rose(self, name: str, **labels: str) -> float:
        """Increase of a counter, or of the number of a histogram's observations."""
        key = (name, tuple(labels.items()))
        return _number(self._after.get(key, 0.0)) - _number(self._before.get(key, 0.0))

    def rate(self, name: str, **labels: str) -> float:
        """Increase per second."""
        return self.rose(name, **labels) / self._seconds

    def now(self, name: str, **labels: str) -> float:
        """Value of a gauge at the second reading."""
        return _number(self._after.get((name, tuple(labels.items())), 0.0))

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of a histogram's new observations; None without any."""
        key = (name, tuple(labels.items()))
        count = self.rose(name, **labels)
        return (_total(self._after.get(key)) - _total(self._before.get(key))) / count if count else None

    def rises(self, name: str) -> dict[str, float]:
        """Increase of a counter for each value of its label, without values that did not increase."""
        keys = [key for key in self._after if key[0] == name and key[1]]
        risen = {key[1][0][1]: self.rose(name, **dict(key[1])) for key in keys}
        return {label: rise for label, rise in risen.items() if rise}


async def log_stats(
    interval_s: float, read: Callable[[], Iterable[Reading]], say: Callable[[Window], Fields | None]
) -> None:
    """Log the fields that ``say`` returns, every ``interval_s`` seconds; with an interval of 0, never.

    Nothing is logged if ``say`` returns None, because the process was idle.
    """
    if not interval_s:
        return
    before, began = list(read()), time.perf_counter()
    while True:
        await asyncio.sleep(interval_s)
        after, now = list(read()), time.perf_counter()
        fields = say(Window(before, after, now - began))
        before, began = after, now
        if fields is not None:
            _log.info("busy", extra={"fields": fields})


def coordinator_fields(window: Window) -> Fields | None:
    """Fields of a coordinator's line; None when it judged no step."""
    prefix = "outrider_spec_decode_num_"
    if not window.rose("outrider_steps_total"):
        return None
    fields: Fields = {
        "running": int(window.now("outrider_num_requests_running")),
        "waiting": int(window.now("outrider_num_requests_waiting")),
        "tokens_per_s": round(window.rate(f"{prefix}emitted_tokens_total"), 1),
        "steps_per_s": round(window.rate("outrider_steps_total"), 1),
    }
    fields["draft_length"] = round(window.now("outrider_draft_length"), 2)
    draft_tokens, drafts = window.rose(f"{prefix}draft_tokens_total"), window.rose(f"{prefix}drafts_total")
    accepted = window.rose(f"{prefix}accepted_tokens_total")
    if draft_tokens and drafts:
        fields["acceptance_rate"] = round(accepted / draft_tokens, 3)
        fields["mean_acceptance_length"] = round(1 + accepted / drafts, 2)
    for phase, stage in product(("prefill", "decode"), ("draft", "score", "accept", "wire")):
        mean = window.mean("outrider_step_stage_seconds", phase=phase, stage=stage)
        _add_mean(fields, f"{phase}_{stage}_ms", mean)
    if forced := window.rose("outrider_forced_tokens_total"):
        fields["forced_tokens"] = int(forced)
    if window.rose("outrider_grammar_compile_seconds"):
        _add_mean(fields, "grammar_compile_ms", window.mean("outrider_grammar_compile_seconds"))
    reasons = window.rises("outrider_steps_without_draft_total")
    if reasons:
        fields["without_draft"] = ",".join(f"{reason}:{int(count)}" for reason, count in reasons.items())
    return fields


def service_fields(window: Window) -> Fields | None:
    """Fields of a draft's or target's line; None when it ran no forward."""
    if not window.rose("outrider_forward_batch_size"):
        return None
    fields: Fields = {"forwards_per_s": round(window.rate("outrider_forward_batch_size"), 1)}
    for key, name in (("batch_size", "outrider_forward_batch_size"), ("tokens", "outrider_forward_tokens")):
        mean = window.mean(name)
        fields[key] = None if mean is None else round(mean, 1)
    for stage in ("queue", "forward", "sample"):
        _add_mean(fields, f"{stage}_ms", window.mean("outrider_forward_stage_seconds", stage=stage))
    if window.rose("outrider_grammar_mask_seconds"):
        _add_mean(fields, "mask_ms", window.mean("outrider_grammar_mask_seconds"))
    fields["sessions"] = int(window.now("outrider_sessions_open"))
    fields["pages_used"] = int(window.now("outrider_kv_pages_used"))
    fields["pages_free"] = int(window.now("outrider_kv_pages_free"))
    return fields


def _add_mean(fields: Fields, key: str, seconds: float | None) -> None:
    if seconds is not None:
        fields[key] = round(1e3 * seconds, 2)


_Key = tuple[str, tuple[tuple[str, str], ...]]


def _by_key(readings: Iterable[Reading]) -> dict[_Key, float | HistogramReading]:
    return {(reading.name, reading.labels): reading.value for reading in readings}


def _number(value: float | HistogramReading) -> float:
    return value.count if isinstance(value, HistogramReading) else value


def _total(value: float | HistogramReading | None) -> float:
    return value.total if isinstance(value, HistogramReading) else 0.0
