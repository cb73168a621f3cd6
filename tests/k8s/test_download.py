"""The download of a model, run as the chart renders it, against a Hub of this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.k8s.helm import ROOT
from tests.k8s.release import Object, Release

COMMIT = "c" * 40
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"weights again",
    "original/params.json": b"[]",
    "pytorch_model.bin": b"and again",
    "README.md": b"#",
}
READ = {"config.json", "tokenizer.json", "model.safetensors"}


class Hub(http.server.ThreadingHTTPServer):
    """Repositories with the files of ``MODEL``; those in ``broken`` cannot be had."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.broken: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        """A repository's description, its list of files, or a file."""
        path = self.path.partition("?")[0]
        if "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(MODEL[n]), "oid": _digest(n)} for n in MODEL]
            self._send(200, json.dumps(tree).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in MODEL]
            self._send(200, json.dumps({"id": "own/er", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            self._send(404 if name in self.server.broken else 200, MODEL[name], ETag=f'"{_digest(name)}"')

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(name: str) -> str:
    return hashlib.sha1(MODEL[name]).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def init_container(release: Callable[[str], Release], service: str) -> Object:
    spec = release("downloads-in-one-pod").workload_of(service).spec
    found: Object = next(c for c in spec["initContainers"] if c["name"] == f"download-{service}")
    return found


def fetched(container: Object, hub_url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    def here(word: str) -> str:
        return word.replace("/opt/outrider/", f"{ROOT}/scripts/image/").replace("/models/", f"{folder}/models/")

    variables = {v["name"]: v["value"].replace("/var/cache/outrider", str(folder)) for v in container["env"]}
    environment = {**os.environ, **variables, "HF_ENDPOINT": hub_url, "NO_PROXY": "127.0.0.1"}
    assert container["command"][0] == "python"
    words = [sys.executable, *map(here, container["command"][1:])]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def read(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith(".")}


def test_a_download_brings_what_is_read_and_no_second_copy(
    release: Callable[[str], Release], hub: Hub, tmp_path: Path
) -> None:
    done = fetched(init_container(release, "target"), hub.url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--model=/models/target" in release("downloads-in-one-pod").flags("target")
    assert read(tmp_path / "models" / "target") == READ
    # The Hub is away when the pod comes again: what is there is used.
    again = fetched(init_container(release, "target"), "http://127.0.0.1:9", tmp_path)
    assert again.returncode == 0, again.stderr
    assert "was not checked" in again.stderr


def test_a_coordinator_fetches_no_weights(release: Callable[[str], Release], hub: Hub, tmp_path: Path) -> None:
    assert fetched(init_container(release, "coordinator"), hub.url, tmp_path).returncode == 0
    assert read(tmp_path / "models" / "coordinator") == READ - {"model.safetensors"}


def test_half_a_model_is_never_taken_for_one(release: Callable[[str], Release], hub: Hub, tmp_path: Path) -> None:
    hub.broken = {"model.safetensors"}
    for url in (hub.url, "http://127.0.0.1:9"):
        failed = fetched(init_container(release, "draft"), url, tmp_path)
        assert failed.returncode == 1, failed.stderr
        assert "error: own/draft@main was not fetched into" in failed.stderr
    hub.broken = set()
    assert fetched(init_container(release, "draft"), hub.url, tmp_path).returncode == 0
    assert read(tmp_path / "models" / "draft") == READ
