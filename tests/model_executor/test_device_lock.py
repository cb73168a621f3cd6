"""Device lock: captures share it, a measurement holds it alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from outrider.model_executor.device_lock import device_lock

DEVICE = "GPU-0"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "is_taken"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_only_sharers_hold_it_together(first: bool, second: bool, is_taken: bool) -> None:
    with device_lock(DEVICE, is_shared=first) as is_first_taken:
        assert is_first_taken
        with device_lock(DEVICE, is_shared=second, patience_s=0.0) as found:
            assert found is is_taken
        with device_lock("GPU-1", patience_s=0.0) as is_free:
            assert is_free
    with device_lock(DEVICE, patience_s=0.0) as is_free:
        assert is_free


def test_a_folder_that_cannot_be_written_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with device_lock(DEVICE) as is_taken:
        assert not is_taken
