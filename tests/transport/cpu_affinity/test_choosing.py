"""Processors that a process takes: few of the free cores, and none where its time is rationed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from outrider.process.cpu_affinity.choice import automatic_count, has_quota, take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processors are taken on Linux alone")


@pytest.fixture
def family() -> str:
    """Names that no other test's processors have."""
    return f"test-{os.getpid()}"


def _allow(monkeypatch: pytest.MonkeyPatch, *processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(processors))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def test_two_processes_take_different_processors_and_the_first_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    _allow(monkeypatch, 0, 1, 2, 3)
    one = take(2, first=0, family=family, system=tmp_path)
    other = take(2, first=0, family=family, system=tmp_path)
    assert (one.processors, other.processors) == ((1, 2), (3, 0))
    assert take(1, first=0, family=family, system=tmp_path).processors == ()
    one.give_back()
    assert take(1, first=0, family=family, system=tmp_path).processors == (1,)
    other.give_back()


def test_a_core_is_taken_with_all_its_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    _allow(monkeypatch, 0, 1, 2, 3)
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        _write(tmp_path / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list", f"{siblings}\n")
    taken = take(4, first=0, family=family, system=tmp_path)
    assert taken.processors == (3, 2)
    taken.give_back()


def test_neighbours_that_may_be_one_core_are_not_taken_together_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    _allow(monkeypatch, *range(16))
    three = [take(1, first=0, family=family, system=tmp_path) for _ in range(3)]
    assert [taken.processors for taken in three] == [(1,), (3,), (5,)]
    every = take(16, family=family, system=tmp_path)
    assert sorted(every.processors) == sorted({*range(16)} - {1, 3, 5})
    assert every.processors[-1] == 0
    for taken in (*three, every):
        taken.give_back()


@pytest.mark.parametrize("text", ["200000 100000\n", "50000 100000\n"])
def test_a_quota_of_version_two_is_seen(tmp_path: Path, text: str) -> None:
    assert not has_quota(tmp_path)
    _write(tmp_path / "fs/cgroup/cpu.max", "max 100000\n")
    assert not has_quota(tmp_path)
    _write(tmp_path / "fs/cgroup/cpu.max", text)
    assert has_quota(tmp_path)


def test_a_quota_of_version_one_is_seen(tmp_path: Path) -> None:
    _write(tmp_path / "fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert not has_quota(tmp_path)
    _write(tmp_path / "fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n")
    assert has_quota(tmp_path)


@pytest.fixture
def no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment without the pod that these tests may run in."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.usefixtures("no_pod")
def test_none_are_taken_unasked_on_a_small_host_nor_under_a_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _allow(monkeypatch, *range(7))
    assert automatic_count(tmp_path) == 0
    _allow(monkeypatch, *range(8))
    assert automatic_count(tmp_path) == 1
    _write(tmp_path / "fs/cgroup/cpu.max", "400000 100000\n")
    assert automatic_count(tmp_path) == 0


@pytest.mark.usefixtures("no_pod")
def test_in_a_pod_some_are_taken_unasked_only_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _allow(monkeypatch, *range(8))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert automatic_count(tmp_path) == 1
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert automatic_count(tmp_path) == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert automatic_count(tmp_path) == 1
