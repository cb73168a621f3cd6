"""A Hugging Face Hub of one process: what ``huggingface_hub`` asks for when it downloads a snapshot, over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "5d0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b"


@dataclass
class FakeHub:
    """One repository, ``owner/model``, with a branch ``main`` and a tag ``v1`` of the same commit."""

    files: Mapping[str, bytes]
    token: str = ""
    """Token that is required if it is not empty; ``gated`` then says how its lack is told."""
    gated: bool = False
    url: str = ""
    requests: list[str] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of a file after which the connection is lost, of one answer after the other."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """First byte that was asked for of a file with cuts, and bytes that were sent."""

    held: str = ""
    """File of which nothing is sent until ``released``."""
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one GET or HEAD."""
        path = handler.path.partition("?")[0]
        self.requests.append(f"{handler.command} {path}")
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            code = "GatedRepo" if self.gated else "RepoNotFound"
            return _send(handler, 403 if self.gated else 404, b"{}", {"X-Error-Code": code})
        if path in {
            "/api/models/owner/model",
            *(f"/api/models/owner/model/revision/{name}" for name in ("main", "v1")),
        }:
            siblings = [{"rfilename": name} for name in self.files]
            return _send_json(
                handler, {"id": "owner/model", "modelId": "owner/model", "sha": SHA, "siblings": siblings}
            )
        if path.startswith("/api/models/owner/model/revision/"):
            return _send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/owner/model/tree/"):
            return _send_json(handler, [_entry(name, content) for name, content in self.files.items()])
        name = path.removeprefix(f"/owner/model/resolve/{SHA}/")
        if name in self.files:
            etag = hashlib.sha1(self.files[name]).hexdigest()
            headers = {"X-Repo-Commit": SHA, "ETag": f'"{etag}"'}
            if name == self.held and handler.command == "GET" and not self.released.is_set():
                self.released.wait()
                handler.close_connection = True
                return None
            if name in self.cuts and handler.command == "GET":
                return self._send_part(handler, name, headers)
            return _send(handler, 200, self.files[name], headers)
        code = "EntryNotFound" if path.startswith("/owner/model/") else "RepoNotFound"
        return _send(handler, 404, b"{}", {"X-Error-Code": code})

    def _send_part(self, handler: BaseHTTPRequestHandler, name: str, headers: dict[str, str]) -> None:
        """Send what is asked for of a file, and lose the connection where that is due."""
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        content = self.files[name]
        left = content[start:]
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        num_sent = min(self.cuts[name].pop(0), len(left)) if self.cuts[name] else len(left)
        self.ranges.append((start, num_sent))
        _send(handler, 206 if start else 200, left, headers, num_sent=num_sent)
        handler.close_connection = True


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _send_json(handler: BaseHTTPRequestHandler, value: object) -> None:
    _send(handler, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    *,
    num_sent: int | None = None,
) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body[:num_sent])


@contextlib.contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, answering at its ``url``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
