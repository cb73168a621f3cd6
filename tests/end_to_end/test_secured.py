"""`outrider serve` with mutual TLS and tokens on every hop, as a user sees it: SDK, command line, probes."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml

from outrider import Client, Tls
from outrider.cli.stack.held_ports import hold_port
from outrider.errors import UnauthenticatedError, UnavailableError
from outrider.v1 import link_pb2, link_pb2_grpc
from tests.end_to_end.commands import Command, wait_until
from tests.transport.security.authorities import Authority


@dataclass(frozen=True)
class Secured:
    """A running stack, and what its users need."""

    command: Command
    tls: Tls
    token_file: Path
    health_ports: dict[str, int]

    @property
    def flags(self) -> list[str]:
        """Flags of the command line."""
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
    health = {section: hold_port() for section in ("target", "draft", "coordinator")}
    public = {**served, **linked, "link_token_file": str(tokens["link"]), "api_token_file": str(tokens["api"])}
    config = folder / "outrider.yaml"
    sections = {
        "target": {"model": str(tiny_pair[0]), "health_port": health["target"], **service},
        "draft": {"method": "ngram", "health_port": health["draft"], **service},
        "coordinator": {"health_port": health["coordinator"], **public},
    }
    config.write_text(yaml.safe_dump(sections))
    command = Command("--config", str(config), "-v")
    try:
        command.address()
        yield Secured(command, Tls(ca_file=authority.ca_file, **mine), tokens["api"], health)
    finally:
        command.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_who_shows_a_certificate_and_a_token_is_served(secured: Secured) -> None:
    with Client(secured.command.address(), tls=secured.tls, token="the-api-token") as client:
        wait_until(lambda: client.model_info().draft_attached, "the draft attached")
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


@pytest.mark.parametrize("service", ["outrider_target", "outrider_draft"])
def test_the_services_ask_too(secured: Secured, service: str) -> None:
    address = secured.command.address_of(service)
    with (
        Client(address, tls=False) as client,
        pytest.raises(UnavailableError, match="speaks TLS and closed the connection"),
    ):
        client.model_info()
    bare = Tls(ca_file=secured.tls.ca_file)
    with Client(address, tls=bare) as client, pytest.raises(UnavailableError, match="client certificate"):
        client.model_info()
    assert status_of_describe(address, secured.tls, "the-api-token") is grpc.StatusCode.UNAUTHENTICATED
    assert status_of_describe(address, secured.tls, "the-link-token") is grpc.StatusCode.OK


def status_of_describe(address: str, tls: Tls, token: str) -> grpc.StatusCode:
    """Answer of a service to a caller with a certificate and this token."""
    files = [Path(str(path)).read_bytes() for path in (tls.ca_file, tls.key_file, tls.cert_file)]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(*files)) as channel:
        services = (link_pb2_grpc.TargetServiceStub, link_pb2_grpc.DraftServiceStub)
        metadata = (("authorization", f"Bearer {token}"),)
        codes = set()
        for stub in services:
            try:
                stub(channel).Describe(link_pb2.DescribeRequest(), metadata=metadata, timeout=120)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    # The one of the two that this service is not.
    (code,) = codes - {grpc.StatusCode.UNIMPLEMENTED}
    return code


def test_text_is_the_same_by_the_sdk_and_the_command_line(secured: Secured) -> None:
    prompt, address = "abc abc abc", secured.command.address()
    with Client(address, tls=secured.tls, token="the-api-token") as client:
        whole = client.generate(prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True)
        pieces = [delta.text for delta in client.stream(prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True)]
    assert whole.text
    assert "".join(pieces) == whole.text
    said = run(
        *("generate", prompt, "--max-tokens", "12", "--temperature", "0", "--ignore-eos"),
        *(*secured.flags, "--token-file", str(secured.token_file)),
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"{whole.text}\n"


def test_the_command_line(secured: Secured) -> None:
    token = ["--token-file", str(secured.token_file)]
    shown = run("info", "--json", *secured.flags, *token)
    assert (shown.returncode, "target_model" in shown.stdout) == (0, True), shown.stderr
    refused = run("info", *secured.flags)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: this service asks for a bearer token: --token-file FILE, ")


@pytest.mark.parametrize("service", ["target", "draft", "coordinator"])
def test_probes_over_http_need_neither(secured: Secured, service: str) -> None:
    for path in ("livez", "readyz", "startupz"):
        url = f"http://127.0.0.1:{secured.health_ports[service]}/{path}"
        with urllib.request.urlopen(url, timeout=120) as answer:
            assert answer.status == 200


def test_the_target_killed_takes_readiness_along_and_not_liveness(secured: Secured) -> None:
    import os
    import signal

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{secured.health_ports['coordinator']}/readyz", timeout=120):
                return True
        except urllib.error.HTTPError:
            return False

    wait_until(is_ready, "a ready coordinator", secured.command.err)
    os.kill(secured.command.children()["outrider_target"], signal.SIGKILL)
    wait_until(lambda: not is_ready(), "readiness following the target", secured.command.err)
    with urllib.request.urlopen(f"http://127.0.0.1:{secured.health_ports['coordinator']}/livez", timeout=120) as answer:
        assert answer.status == 200
    wait_until(is_ready, "readiness when the target is back", secured.command.err)
