"""`outrider serve` with mutual TLS and tokens on every hop, as a user sees it: SDK, command line, probes."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from outrider import Client, Tls
from outrider.cli.stack.preflight import free_port
from outrider.errors import UnauthenticatedError, UnavailableError
from tests.end_to_end.commands import Command, wait_until
from tests.transport.security.authorities import Authority

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Secured:
    """A running stack, and what its users need."""

    command: Command
    tls: Tls
    token_file: Path
    health_port: int

    @property
    def flags(self) -> list[str]:
        """Of the command line."""
        files = {"ca": self.tls.ca_file, "cert": self.tls.cert_file, "key": self.tls.key_file}
        named = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
        return ["--address", self.command.address(), *named]


@pytest.fixture(scope="module")
def secured(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    tokens = {name: folder / f"{name}.tokens" for name in ("api", "link")}
    for name, path in tokens.items():
        path.write_text(f"the-{name}-token\n")
    server = authority.issue("127.0.0.1")
    mine = authority.issue("caller", file="caller")
    served = {f"tls_{name}": path for name, path in server.items()} | {"tls_client_ca_file": authority.ca_file}
    linked = {f"link_tls_{name}": path for name, path in mine.items()} | {"link_tls_ca_file": authority.ca_file}
    service = {**served, "link_token_file": str(tokens["link"])}
    health_port = free_port()
    public = {**served, **linked, "link_token_file": str(tokens["link"]), "api_token_file": str(tokens["api"])}
    config = folder / "outrider.yaml"
    sections = {
        "target": {"model": str(tiny_pair[0]), **service},
        "draft": {"method": "ngram", **service},
        "coordinator": {**public, "health_port": health_port},
    }
    config.write_text(yaml.safe_dump(sections))
    command = Command("--config", str(config), "-v")
    try:
        command.address()
        yield Secured(command, Tls(ca_file=authority.ca_file, **mine), tokens["api"], health_port)
    finally:
        command.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_who_shows_a_certificate_and_a_token_is_served(secured: Secured) -> None:
    with Client(secured.command.address(), tls=secured.tls, token="the-api-token") as client:
        assert client.model_info().draft_attached
        result = client.generate(prompt_token_ids=[1, 2, 1, 2, 1, 2], max_tokens=8, temperature=0, ignore_eos=True)
    assert result.usage.completion_tokens == 8


def test_who_lacks_either_is_told_so(secured: Secured) -> None:
    address = secured.command.address()
    for token in (None, "the-link-token"):
        with Client(address, tls=secured.tls, token=token) as client, pytest.raises(UnauthenticatedError):
            client.model_info()
    bare = Tls(ca_file=secured.tls.ca_file)
    with (
        Client(address, tls=bare, token="the-api-token") as client,
        pytest.raises(UnavailableError, match="client certificate"),
    ):
        client.model_info()


def test_the_services_ask_too(secured: Secured) -> None:
    with (
        Client(secured.command.address_of("target_service"), tls=False) as client,
        pytest.raises(UnavailableError, match="if it speaks TLS"),
    ):
        client.model_info()


def test_the_command_line(secured: Secured) -> None:
    token = ["--token-file", str(secured.token_file)]
    shown = run("info", *secured.flags, *token)
    assert (shown.returncode, "target_model" in shown.stdout) == (0, True), shown.stderr
    made = run("generate", "x", "--max-tokens", "2", *secured.flags, *token)
    assert made.returncode == 0, made.stderr
    refused = run("info", *secured.flags)
    assert (refused.returncode, refused.stderr) == (1, "error: this service asks for a bearer token\n")


def test_probes_over_http_need_neither(secured: Secured) -> None:
    for path in ("livez", "readyz", "startupz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{secured.health_port}/{path}", timeout=20) as answer:
            assert answer.status == 200


def test_the_target_killed_takes_readiness_along_and_not_liveness(secured: Secured) -> None:
    import os
    import signal

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{secured.health_port}/readyz", timeout=20):
                return True
        except urllib.error.HTTPError:
            return False

    wait_until(is_ready, "a ready coordinator", secured.command.err)
    os.kill(secured.command.children()["target_service"], signal.SIGKILL)
    wait_until(lambda: not is_ready(), "readiness following the target", secured.command.err)
    with urllib.request.urlopen(f"http://127.0.0.1:{secured.health_port}/livez", timeout=20) as answer:
        assert answer.status == 200
    wait_until(is_ready, "readiness when the target is back", secured.command.err)
