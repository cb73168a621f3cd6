"""`python -m outrider.gateway` as a process: HTTPS, client certificates, a port in use, the end by a signal."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli.stack.held_ports import hold_port
from tests.client.conftest import Service
from tests.gateway.conftest import wait_until
from tests.transport.security.authorities import Authority


@contextmanager
def process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "outrider.gateway", "--drain-delay-s", "0", *flags]
    found = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        found.kill()
        found.communicate()


def is_listening(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def test_https_with_client_certificates(service: Service, tmp_path: Path) -> None:
    authority, port = Authority(tmp_path), hold_port()
    server, mine = authority.issue("127.0.0.1"), authority.issue("caller", file="caller")
    flags = ["--coordinator", service.address, "--port", str(port), "--tls-client-ca-file", str(authority.ca_file)]
    flags += ["--tls-cert-file", str(server["cert_file"]), "--tls-key-file", str(server["key_file"])]
    with process(*flags) as gateway:
        wait_until(lambda: is_listening(port) or gateway.poll() is not None, "the port")
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        url = f"https://127.0.0.1:{port}/v1/models"
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            urllib.request.urlopen(url, timeout=120, context=context)
        context.load_cert_chain(str(mine["cert_file"]), str(mine["key_file"]))
        with urllib.request.urlopen(url, timeout=120, context=context) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "scripted"
        gateway.terminate()
        assert gateway.wait(120) == 0


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with process("--port", str(taken.getsockname()[1])) as gateway:
            assert gateway.wait(120) == 1
            said = gateway.stderr.read() if gateway.stderr else ""
    assert "--port: 127.0.0.1" in said and "Traceback" not in said
