"""Progress of something long, where no terminal is watching."""

from __future__ import annotations

import logging
import time

import pytest

from outrider.telemetry.progress import ByteProgress, CountProgress


def test_the_end_is_logged_and_what_lasts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = CountProgress("capturing")
    for done in range(1, 29):
        now += 0.5
        progress(done, 28)
    assert caplog.messages == [f"capturing: {done} of 28" for done in (12, 23, 28)]


def test_bytes_are_told_in_mebibytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ByteProgress("loading")(3 << 20, 3 << 20)
    assert caplog.messages == ["loading: 3 of 3 MiB"]


def test_a_second_run_is_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = CountProgress("capturing")
    for _ in range(2):
        for done in (1, 2):
            progress(done, 2)
    assert caplog.messages == ["capturing: 2 of 2"] * 2
