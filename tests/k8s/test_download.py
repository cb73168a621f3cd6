"""Download of a model, run as the chart renders it, against a Hub and a bucket on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
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


class Bucket(http.server.ThreadingHTTPServer):
    """A bucket with the files of ``MODEL`` below llama/8b, in the form that S3 and Cloud Storage's XML API share."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _BucketHandler)
        self.broken: set[str] = set()
        self.fetched: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _BucketHandler(_Handler):
    server: Bucket  # type: ignore[assignment]

    def do_GET(self) -> None:
        """The list of objects directly below a prefix, or an object."""
        parts = urllib.parse.urlsplit(self.path)
        assert parts.path.startswith("/weights")
        if "list-type=2" in parts.query:
            assert "prefix=llama%2F8b%2F&" in f"{parts.query}&"
            assert "delimiter=%2F" in parts.query
            self._send(200, self._listing().encode())
            return
        name = urllib.parse.unquote(parts.path).removeprefix("/weights/llama/8b/")
        self.server.fetched.append(name)
        broken = name in self.server.broken
        self._send(403 if broken else 200, b"" if broken else MODEL[name], **_object_headers(name))

    def _listing(self) -> str:
        entries = "".join(
            f"<Contents><Key>llama/8b/{name}</Key><Size>{len(MODEL[name])}</Size><ETag>{_digest(name)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in MODEL
            if "/" not in name
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


def _object_headers(name: str) -> dict[str, str]:
    return {"ETag": f'"{_digest(name)}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


def _digest(name: str) -> str:
    return hashlib.sha1(MODEL[name]).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def init_container(release: Callable[[str], Release], service: str, case: str = "downloads-in-one-pod") -> Object:
    spec = release(case).workload_of(service).spec
    found: Object = next(c for c in spec["initContainers"] if c["name"] == f"download-{service}")
    return found


def fetched(container: Object, hub_url: str, folder: Path, **secret: str) -> subprocess.CompletedProcess[str]:
    def here(word: str) -> str:
        return word.replace("/opt/outrider/", f"{ROOT}/scripts/image/").replace("/models/", f"{folder}/models/")

    variables = {v["name"]: v["value"].replace("/var/cache/outrider", str(folder)) for v in container["env"]}
    environment = {**os.environ, **variables, "HF_ENDPOINT": hub_url, "NO_PROXY": "127.0.0.1", **secret}
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


def secret_of(source: str, url: str) -> dict[str, str]:
    """Content of the Secret of an example, for a server of this machine."""
    if source == "s3":
        return {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "r", "AWS_ENDPOINT_URL": url}
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


@pytest.mark.parametrize("source", ["s3", "gs"])
def test_a_bucket_gives_what_is_read_and_is_asked_only_for_what_is_missing(
    release: Callable[[str], Release], bucket: Bucket, tmp_path: Path, source: str
) -> None:
    container = init_container(release, "target" if source == "s3" else "draft", "buckets")
    assert container["command"][2] == f"{source}://weights/llama/8b"
    secret = secret_of(source, bucket.url)
    bucket.broken = {"model.safetensors"}
    failed = fetched(container, "", tmp_path, **secret)
    assert failed.returncode == 1
    assert f"error: {source}://weights/llama/8b was not fetched into" in failed.stderr
    bucket.broken = set()
    bucket.fetched.clear()
    done = fetched(container, "", tmp_path, **secret)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "models" / "8b") == READ
    assert (tmp_path / "models" / "8b" / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert "model.safetensors" in bucket.fetched
    bucket.fetched.clear()
    assert fetched(container, "", tmp_path, **secret).returncode == 0
    assert bucket.fetched == []


def test_a_coordinator_fetches_no_weights_from_a_bucket(
    release: Callable[[str], Release], bucket: Bucket, tmp_path: Path
) -> None:
    container = init_container(release, "coordinator", "buckets")
    assert fetched(container, "", tmp_path, **secret_of("s3", bucket.url)).returncode == 0
    assert read(tmp_path / "models" / "8b") == READ - {"model.safetensors"}


def test_a_complete_folder_serves_while_its_bucket_is_away(
    release: Callable[[str], Release], bucket: Bucket, tmp_path: Path
) -> None:
    container = init_container(release, "target", "buckets")
    assert fetched(container, "", tmp_path, **secret_of("s3", bucket.url)).returncode == 0
    bucket.shutdown()
    bucket.server_close()
    again = fetched(container, "", tmp_path, **secret_of("s3", bucket.url))
    assert again.returncode == 0, again.stderr
    assert "was not checked" in again.stderr
