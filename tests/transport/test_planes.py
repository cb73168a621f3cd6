"""Shared memory: agreed on only where it is really shared, used again, never written over, left behind by nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import ProtocolError
from outrider.tensor_plane import shared_file
from outrider.transport.planes import writer
from outrider.transport.planes.reader import SharedReader
from outrider.transport.planes.writer import MIN_TENSOR_BYTES, SharedWriter
from outrider.types import FloatArray
from outrider.v1.tensor_pb2 import SharedMemoryRegion

ROWS = 5


def rows_of(value: float, *, num_bytes: int = 4 * MIN_TENSOR_BYTES) -> FloatArray:
    return np.full((ROWS, num_bytes // ROWS // 4), value, dtype=np.float32)


def connect(folder: Path, *, max_bytes: int = 16 << 20) -> tuple[SharedWriter, SharedReader]:
    made = SharedWriter(folder=folder, max_bytes=max_bytes)
    reader = SharedReader.open(made.name, folder=folder)
    assert reader is not None
    made.confirm(reader.token)
    assert made.is_confirmed
    return made, reader


def place(end: SharedWriter, values: FloatArray) -> SharedMemoryRegion:
    region = end.place(values)
    assert region is not None
    return region


def test_arrays_arrive_as_they_were_and_their_memory_is_used_again(tmp_path: Path) -> None:
    end, reader = connect(tmp_path)
    offsets = set()
    for value in range(100):
        region = place(end, rows_of(value))
        offsets.add(region.offset_bytes)
        assert end.num_in_use == 1
        assert (reader.fetch(region).view("<f4") == value).all()
        assert end.num_in_use == 0
    assert len(offsets) == 1


def test_what_was_read_does_not_change_when_its_memory_is_used_again(tmp_path: Path) -> None:
    end, reader = connect(tmp_path)
    regions = [place(end, rows_of(value)) for value in range(3)]
    held = [reader.fetch(region).view("<f4") for region in regions]
    assert end.num_in_use == 0
    assert {place(end, rows_of(9)).offset_bytes for _ in range(3)} == {region.offset_bytes for region in regions}
    assert [set(seen.tolist()) for seen in held] == [{0.0}, {1.0}, {2.0}]


def test_what_is_unread_is_never_written_over(tmp_path: Path) -> None:
    values = rows_of(0)
    end, reader = connect(tmp_path, max_bytes=shared_file.HEADER_BYTES + 4 * (values.nbytes + 4096))
    regions: list[SharedMemoryRegion] = []
    while (region := end.place(rows_of(len(regions)))) is not None:
        regions.append(region)
    assert len(regions) == end.num_in_use >= 4
    assert (reader.fetch(regions[1]).view("<f4") == 1).all()
    regions[1] = place(end, rows_of(1))
    assert end.place(rows_of(78)) is None
    assert [float(reader.fetch(region).view("<f4")[-1]) for region in regions] == list(range(len(regions)))


@pytest.mark.parametrize("num_bytes", [0, 64, shared_file.HEADER_BYTES, shared_file.HEADER_BYTES + 5000])
def test_a_file_that_is_shortened_ends_neither_process(tmp_path: Path, num_bytes: int) -> None:
    end = SharedWriter(folder=tmp_path)
    owned = os.open(tmp_path / end.name, os.O_RDWR)
    reader = SharedReader.open(end.name, folder=tmp_path)
    assert reader is not None
    end.confirm(reader.token)
    region = place(end, rows_of(1))
    os.ftruncate(owned, num_bytes)
    with pytest.raises(ProtocolError, match="beyond the end of the file"):
        reader.fetch(region)
    assert end.num_in_use == 1
    again = place(end, rows_of(2))
    reader.begin_message()
    assert (reader.fetch(again).view("<f4") == 2).all()
    os.ftruncate(owned, 0)
    end.close()
    os.close(owned)


def test_a_message_has_no_more_than_a_file_holds(tmp_path: Path) -> None:
    """A file may be long without any memory, and a region may be named again and again."""
    end = SharedWriter(folder=tmp_path)
    owned = os.open(tmp_path / end.name, os.O_RDWR)
    reader = SharedReader.open(end.name, folder=tmp_path)
    assert reader is not None
    os.ftruncate(owned, 1 << 40)
    os.close(owned)
    with pytest.raises(ProtocolError):
        reader.fetch(SharedMemoryRegion(offset_bytes=shared_file.HEADER_BYTES, length_bytes=1 << 39))
    for _ in range(3):
        reader.begin_message()
        reader.fetch(SharedMemoryRegion(offset_bytes=shared_file.HEADER_BYTES, length_bytes=1 << 20))
    part = SharedMemoryRegion(offset_bytes=shared_file.HEADER_BYTES, length_bytes=shared_file.MAX_BYTES // 8)
    with pytest.raises(ProtocolError):
        for _ in range(9):
            reader.fetch(part)


def test_the_file_grows_as_far_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GROWTH_BYTES", 1 << 20)
    end, reader = connect(tmp_path, max_bytes=4 << 20)
    regions = [place(end, rows_of(value, num_bytes=1 << 20)) for value in range(3)]
    assert end.place(rows_of(9, num_bytes=1 << 20)) is None
    assert [reader.fetch(region).view("<f4")[0] for region in regions] == [0, 1, 2]


def test_small_arrays_travel_inline(tmp_path: Path) -> None:
    end, _ = connect(tmp_path)
    assert end.place(np.zeros(MIN_TENSOR_BYTES // 4 - 1, dtype=np.float32)) is None


def test_a_host_without_memory_left_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _ = connect(tmp_path)

    def no_space(descriptor: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_file, "grow", no_space)
    assert end.place(rows_of(1)) is None
    assert SharedWriter(folder=tmp_path).name == ""
    assert list(tmp_path.iterdir()) == []


def test_without_the_files_own_token_nothing_is_shared(tmp_path: Path) -> None:
    for token in (b"", b"x" * shared_file.TOKEN_BYTES):
        end = SharedWriter(folder=tmp_path)
        end.confirm(token)
        assert not end.is_confirmed
        assert end.place(rows_of(1)) is None
        assert list(tmp_path.iterdir()) == []
        end.close()


def test_another_host_sees_no_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    end = SharedWriter(folder=tmp_path)
    assert SharedReader.open(end.name, folder=elsewhere) is None
    end.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "outrider-", "outrider-" + "g" * 32])
def test_a_name_that_is_none_of_ours_is_not_opened(tmp_path: Path, name: str) -> None:
    assert SharedReader.open(name, folder=tmp_path) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(shared_file.HEADER_BYTES))
    name = "outrider-" + "a" * 32
    (tmp_path / name).symlink_to(tmp_path / "secret")
    assert SharedReader.open(name, folder=tmp_path) is None


def test_the_name_is_gone_once_both_have_the_file_and_the_reader_outlives_the_writer(tmp_path: Path) -> None:
    end, reader = connect(tmp_path)
    assert list(tmp_path.iterdir()) == []
    region = place(end, rows_of(4))
    end.close()
    assert (reader.fetch(region).view("<f4") == 4).all()


@pytest.mark.parametrize(
    "region",
    [
        SharedMemoryRegion(offset_bytes=0, length_bytes=8),
        SharedMemoryRegion(offset_bytes=shared_file.HEADER_BYTES, length_bytes=1 << 40),
        SharedMemoryRegion(offset_bytes=shared_file.HEADER_BYTES, length_bytes=8, slot=shared_file.NUM_SLOTS),
    ],
)
def test_a_region_outside_the_file_breaks_the_contract(tmp_path: Path, region: SharedMemoryRegion) -> None:
    end, reader = connect(tmp_path)
    place(end, rows_of(1))
    with pytest.raises(ProtocolError, match="shared memory"):
        reader.fetch(region)


_OWNER = """
import sys
from pathlib import Path
from outrider.transport.planes.writer import SharedWriter
end = SharedWriter(folder=Path(sys.argv[1]))
print(end.name, flush=True)
sys.stdin.read()
"""


def test_an_owner_that_is_killed_before_anybody_answered_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    mine = SharedWriter(folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name, mine.name}, "a living owner's file stays"
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    other = SharedWriter(folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, other.name}
    mine.close()
    other.close()
    assert list(tmp_path.iterdir()) == []
