"""Files of planes: whose owner lives they stay, whose owner died they are removed, also while others are being made."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from outrider.tensor_plane import shared_file


def test_a_file_stays_as_long_as_its_owner_lives(tmp_path: Path) -> None:
    name, descriptor = shared_file.create(tmp_path)
    shared_file.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    os.close(descriptor)
    shared_file.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_sweep_between_making_a_file_and_locking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    """Sweep that has removed the file, or has the lock and is about to."""
    lock, swept = fcntl.flock, list[Path]()

    def locked_after_a_sweep(descriptor: int, how: int) -> None:
        if swept:
            lock(descriptor, how)
            return
        swept.extend(tmp_path.iterdir())
        (path,) = swept
        other = os.open(path, os.O_RDWR)
        try:
            lock(other, how)
            if is_under_way:
                lock(descriptor, how)  # raises
            path.unlink()
        finally:
            path.unlink(missing_ok=True)
            os.close(other)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", locked_after_a_sweep)
    name, descriptor = shared_file.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] != [path.name for path in swept]
    shared_file.sweep(tmp_path)
    reader = shared_file.open_existing(tmp_path, name)
    assert os.path.sameopenfile(reader, descriptor)
    os.close(reader)
    os.close(descriptor)
