"""Shared memory: agreed on only where it is really shared, used again, never written over, left behind by nobody."""

from __future__ import annotations

import gc
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
        seen = reader.fetch(region).view("<f4")
        assert (seen == value).all()
        assert end.num_in_use == 1
        del seen
        assert end.num_in_use == 0
    assert len(offsets) == 1


def test_what_is_still_looked_at_is_never_written_over(tmp_path: Path) -> None:
    values = rows_of(0)
    end, reader = connect(tmp_path, max_bytes=shared_file.HEADER_BYTES + 4 * (values.nbytes + 4096))
    held: list[FloatArray] = []
    while (region := end.place(rows_of(len(held)))) is not None:
        held.append(reader.fetch(region).view("<f4").reshape(values.shape))
    assert len(held) == end.num_in_use >= 4
    assert all((seen == index).all() for index, seen in enumerate(held))
    del held[1]
    assert place(end, rows_of(77)).offset_bytes > shared_file.HEADER_BYTES
    assert end.place(rows_of(78)) is None
    assert [float(seen[0, 0]) for seen in held] == [0.0, *(float(index) for index in range(2, len(held) + 1))]


def test_a_view_of_an_array_keeps_its_memory(tmp_path: Path) -> None:
    end, reader = connect(tmp_path)
    row = reader.fetch(place(end, rows_of(3))).view("<f4").reshape(ROWS, -1)[2][5:9]
    gc.collect()
    assert end.num_in_use == 1
    assert row.tolist() == [3.0] * 4
    del row
    assert end.num_in_use == 0


def test_the_file_grows_as_far_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_GROWTH", 1 << 20)
    end, reader = connect(tmp_path, max_bytes=4 << 20)
    held = [reader.fetch(place(end, rows_of(value, num_bytes=1 << 20))) for value in range(3)]
    assert [seen.view("<f4")[0] for seen in held] == [0, 1, 2]
    assert end.place(rows_of(9, num_bytes=1 << 20)) is None


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
    seen = reader.fetch(place(end, rows_of(4))).view("<f4")
    end.close()
    del end
    gc.collect()
    assert (seen == 4).all()


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
