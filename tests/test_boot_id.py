"""The id of a host's start, and what is named by it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider import boot_id
from outrider.boot_id import channel_host
from outrider.tensor_plane.endpoints import PeerFacts

_SAY = "from outrider.boot_id import boot_id; import sys; print(boot_id(), 'torch' in sys.modules)"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have none")
def test_processes_of_a_host_read_the_same_without_torch() -> None:
    said = subprocess.run([sys.executable, "-c", _SAY], capture_output=True, text=True, check=True).stdout
    assert said.split() == [boot_id.boot_id(), "False"]


def test_without_one_a_plane_goes_by_the_hosts_name_and_a_channel_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(boot_id, "PATH", tmp_path / "missing")
    assert boot_id.boot_id() == channel_host() == ""
    assert PeerFacts.of(torch.device("cpu")).host_id == socket.gethostname()
