"""TLS and mutual TLS: what works, what is refused, and that each refusal says what would be right."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider import AsyncClient, Client, Tls
from outrider.errors import ConfigError, OutriderError, TlsError, UnavailableError
from outrider.process.discovery import RemoteReplicas
from outrider.transport.remote import RemoteTarget
from outrider.transport.security import ClientSecurity, ServerSecurity, ServerTls, client_credentials
from tests.transport.security.authorities import Authority
from tests.transport.security.conftest import ServeWith, at_localhost


async def ask(address: str, tls: Tls | bool | None) -> str:
    async with AsyncClient(address, tls=tls) as client:
        return (await client.generate(prompt="x", max_tokens=1, timeout=120)).text


async def trouble(address: str, tls: Tls | bool | None) -> str:
    """Error text of a user."""
    with pytest.raises(TlsError) as caught:
        await ask(address, tls)
    return str(caught.value)


async def trouble_of_link(address: str, tls: Tls | None) -> str:
    """Error text of a coordinator."""
    remote = RemoteTarget(address, ClientSecurity(tls=tls))
    with pytest.raises(UnavailableError) as caught:
        await remote.describe()
    with pytest.raises(UnavailableError) as again:
        await remote.attach()
    assert str(caught.value) == str(again.value)
    return str(caught.value)


def test_without_tls_nothing_needs_what_reads_certificates() -> None:
    modules = "outrider_coordinator.__main__, outrider.cli.app, outrider.client, outrider.transport.server"
    code = f"import sys; sys.modules['cryptography'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_without_cryptography_files_are_checked_for_pem(tmp_path: Path) -> None:
    """Run in a process of its own: the modules that read certificates are imported anew."""
    noise = tmp_path / "noise.pem"
    noise.write_text("nothing")
    code = f"""
import sys; sys.modules["cryptography"] = None
from outrider.errors import ConfigError
from outrider.transport.security import ServerTls
try:
    ServerTls({str(noise)!r}, {str(noise)!r}).credentials()
except ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True, text=True).stdout
    assert said == f"tls_cert_file: {noise} should hold PEM (BEGIN CERTIFICATE)\n"


async def test_tls_with_the_right_authority(serve_with: ServeWith, authority: Authority) -> None:
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**authority.issue()))))
    assert await ask(address, Tls(ca_file=authority.ca_file)) == "<0>"


async def test_plain_clients_of_both_kinds_can_use_it_in_threads(serve_with: ServeWith, authority: Authority) -> None:
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**authority.issue()))))

    def ask_blocking() -> str:
        with Client(address, tls=Tls(ca_file=authority.ca_file)) as client:
            return client.generate(prompt="x", max_tokens=1, timeout=120).text

    assert await asyncio.to_thread(ask_blocking) == "<0>"


async def test_a_link_over_tls_carries_messages(serve_with: ServeWith, authority: Authority) -> None:
    server = await serve_with(ServerSecurity(ServerTls(**authority.issue())), role="target")
    remote = RemoteTarget(at_localhost(server), ClientSecurity(tls=Tls(ca_file=authority.ca_file)))
    assert (await remote.describe()).model_name == "toy-target"
    link = await remote.attach()
    await link.close()


async def test_the_wrong_authority(serve_with: ServeWith, authority: Authority, stranger: Authority) -> None:
    security = ServerSecurity(ServerTls(**authority.issue()))
    told = await trouble(at_localhost(await serve_with(security)), Tls(ca_file=stranger.ca_file))
    assert f"no authority in {stranger.ca_file} has signed" in told
    assert "tls_ca_file should hold" in told
    told = await trouble(at_localhost(await serve_with(security)), tls=True)
    assert "the public list" in told
    link = Tls(ca_file=stranger.ca_file, prefix="link_tls_")
    told = await trouble_of_link(at_localhost(await serve_with(security, role="target")), link)
    assert "link_tls_ca_file should hold" in told


async def test_a_name_that_is_not_in_the_certificate(serve_with: ServeWith, authority: Authority) -> None:
    security = ServerSecurity(ServerTls(**authority.issue("target.example")))
    address = at_localhost(await serve_with(security))
    told = await trouble(address, Tls(ca_file=authority.ca_file))
    assert f"the certificate of {address} is not for its host; tls_server_name" in told
    told = await trouble(address, Tls(ca_file=authority.ca_file, server_name="draft.example"))
    assert "not for 'draft.example'" in told
    assert await ask(address, Tls(ca_file=authority.ca_file, server_name="target.example")) == "<0>"


async def test_a_certificate_that_has_expired_on_the_other_side(authority: Authority) -> None:
    """No server of ours starts with one, but it may expire under a running server, or a proxy may show it."""
    files = authority.issue(is_expired=True)
    pair = (Path(files["key_file"]).read_bytes(), Path(files["cert_file"]).read_bytes())
    server = grpc.aio.server()
    address = f"localhost:{server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))}"
    await server.start()
    try:
        tls = Tls(ca_file=authority.ca_file)
        assert await trouble(address, tls) == f"the certificate of {address} has expired; it needs a new one"
        assert await trouble_of_link(address, tls) == f"the certificate of {address} has expired; it needs a new one"
    finally:
        await server.stop(None)


async def test_a_plain_client_at_a_tls_server_and_the_reverse(serve_with: ServeWith, authority: Authority) -> None:
    behind_tls = ServerSecurity(ServerTls(**authority.issue()))
    tls = Tls(ca_file=authority.ca_file, prefix="link_tls_")
    assert "speaks TLS and closed the connection" in await trouble(at_localhost(await serve_with(behind_tls)), None)
    assert "speaks TLS and closed the connection" in await trouble_of_link(
        at_localhost(await serve_with(behind_tls, role="target")), None
    )
    told = await trouble(at_localhost(await serve_with(ServerSecurity())), tls)
    assert "does not speak TLS" in told and "tls_cert_file" in told
    assert "does not speak TLS" in await trouble_of_link(
        at_localhost(await serve_with(ServerSecurity(), role="target")), tls
    )


async def test_mutual_tls_asks_for_a_certificate_of_the_right_authority(
    serve_with: ServeWith, authority: Authority, stranger: Authority
) -> None:
    asks = ServerSecurity(ServerTls(**authority.issue(), client_ca_file=authority.ca_file))
    address = at_localhost(await serve_with(asks))
    mine = authority.issue("coordinator", file="client")
    assert await ask(address, Tls(ca_file=authority.ca_file, **mine)) == "<0>"
    told = await trouble(address, Tls(ca_file=authority.ca_file))
    assert "if it asks for a client certificate, tls_cert_file and tls_key_file should name one" in told
    foreign = stranger.issue("coordinator", file="foreign")
    told = await trouble(address, Tls(ca_file=authority.ca_file, **foreign))
    assert f"may not trust the client certificate in {foreign['cert_file']}" in told


def test_files_of_a_client_that_are_of_no_use(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    mine, other = authority.issue(file="mine"), stranger.issue(file="other")
    old, early = authority.issue(file="old", is_expired=True), authority.issue(file="early", is_future=True)
    noise, empty = tmp_path / "noise.pem", tmp_path / "empty.pem"
    noise.write_text("no certificate")
    empty.write_text("")
    nowhere = str(tmp_path / "nowhere.pem")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"ca_file": nowhere}, "tls_ca_file", f"{nowhere} cannot be read: No such file"),
        ({"ca_file": str(tmp_path)}, "tls_ca_file", "Is a directory"),
        ({"ca_file": str(noise)}, "tls_ca_file", "should hold certificates in PEM"),
        ({"ca_file": str(empty)}, "tls_ca_file", f"{empty} is empty"),
        ({"ca_file": old["cert_file"]}, "tls_ca_file", "expired"),
        ({**mine, "key_file": other["key_file"]}, "tls_key_file", f"does not belong to the certificate in {mine['cert_file']}"),  # noqa: E501
        ({**mine, "key_file": str(noise)}, "tls_key_file", "should hold a private key in PEM"),
        ({**mine, "cert_file": str(noise)}, "tls_cert_file", "should hold certificates in PEM"),
        (old, "tls_cert_file", "the certificate has expired on 2001-01-02"),
        (early, "tls_cert_file", "is not valid before"),
    ]  # fmt: skip
    for fields, setting, message in cases:
        with pytest.raises(ConfigError, match=setting) as caught:
            client_credentials(Tls(**fields))
        assert caught.value.field == setting
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="tls_key_file: is needed together with tls_cert_file"):
        Tls(cert_file="a.pem")


@pytest.mark.parametrize(
    ("broken", "setting", "message"),
    [
        ("cert_file", "tls_cert_file", "should hold certificates in PEM"),
        ("key_file", "tls_key_file", "should hold a private key in PEM"),
        ("client_ca_file", "tls_client_ca_file", "should hold certificates in PEM"),
    ],
)
async def test_a_server_with_files_of_no_use_does_not_start(
    serve_with: ServeWith, authority: Authority, tmp_path: Path, broken: str, setting: str, message: str
) -> None:
    noise = tmp_path / "noise.pem"
    noise.write_text("nothing")
    files = {**authority.issue(), "client_ca_file": authority.ca_file, broken: str(noise)}
    with pytest.raises(ConfigError) as caught:
        await serve_with(ServerSecurity(ServerTls(**files)))
    assert caught.value.field == setting
    assert message in str(caught.value) and str(noise) in str(caught.value)


async def test_a_server_with_an_expired_certificate_or_anothers_key_does_not_start(
    serve_with: ServeWith, authority: Authority
) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert_file: .* has expired on 2001-01-02"):
        await serve_with(ServerSecurity(ServerTls(**authority.issue(is_expired=True))))
    files = {**authority.issue(), "key_file": authority.issue(file="other")["key_file"]}
    with pytest.raises(ConfigError, match=r"tls_key_file: .* does not belong to the certificate"):
        await serve_with(ServerSecurity(ServerTls(**files)))


async def test_a_socket_file_speaks_no_tls(serve_with: ServeWith, authority: Authority, tmp_path: Path) -> None:
    host = f"unix:{tmp_path / 'a.sock'}"
    with pytest.raises(ConfigError, match="guarded by its permissions"):
        await serve_with(ServerSecurity(ServerTls(**authority.issue())), host=host)
    await serve_with(ServerSecurity(), host=host)
    assert await ask(host, Tls(ca_file=authority.ca_file)) == "<0>"  # a coordinator's one setting for both its links


async def test_an_encrypted_key_is_told_of(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    files = authority.issue()
    key = load_pem_private_key(Path(files["key_file"]).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match=r"tls_key_file: .* is encrypted"):
        client_credentials(Tls(cert_file=files["cert_file"], key_file=str(locked)))


async def test_rotated_files_are_taken_by_both_sides_without_a_restart(serve_with: ServeWith, tmp_path: Path) -> None:
    """New files at the same paths: the authority, the server's pair and the client's."""
    first = Authority(tmp_path)
    tls = Tls(ca_file=first.ca_file, **first.issue("coordinator", file="client"))
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**first.issue(), client_ca_file=first.ca_file))))
    async with AsyncClient(address, tls=tls) as client:
        assert (await client.generate(prompt="x", max_tokens=1, timeout=120)).text == "<0>"
        second = Authority(tmp_path)
        second.issue("coordinator", file="client")
        second.issue()
        assert (await client.generate(prompt="x", max_tokens=1, timeout=120)).text == "<0>"
    assert await ask(address, tls) == "<0>"


async def test_a_rotation_that_went_wrong_leaves_what_was_in_use(
    serve_with: ServeWith, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue()
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**files))))
    Path(files["cert_file"]).write_text("half of it")
    assert await ask(address, Tls(ca_file=authority.ca_file)) == "<0>"
    assert "the one in use stays" in caplog.text
    authority.issue()
    assert await ask(address, Tls(ca_file=authority.ca_file)) == "<0>"


async def test_no_error_of_tls_is_foreign(serve_with: ServeWith, authority: Authority) -> None:
    """Errors are ``OutriderError``s whatever goes wrong, also in streams and for facts."""
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**authority.issue()))))
    async with AsyncClient(address) as client:
        with pytest.raises(OutriderError, match="speaks TLS and closed the connection"):
            await client.model_info()
        with pytest.raises(OutriderError, match="speaks TLS and closed the connection"):
            async for _ in client.stream(prompt="x", timeout=120):
                pass


async def test_replicas_of_a_name_show_certificates_for_that_name(serve_with: ServeWith, authority: Authority) -> None:
    server = await serve_with(ServerSecurity(ServerTls(**authority.issue("targets.example"))), role="target")

    async def resolve(host: str) -> list[str]:
        return ["127.0.0.1"]

    security = ClientSecurity(tls=Tls(ca_file=authority.ca_file, prefix="link_tls_"))
    for name, is_right in (("targets.example", True), ("drafts.example", False)):
        address = f"{name}:{server.address.rpartition(':')[2]}"
        found = RemoteReplicas(address, RemoteTarget, security, interval_s=1.0, resolve=resolve)
        (port,) = (await found.find()).values()
        if is_right:
            assert (await port.describe()).model_name == "toy-target"
        else:
            with pytest.raises(UnavailableError, match=r"is not for 'drafts\.example'"):
                await port.describe()


@pytest.mark.parametrize("resume", [False, True])
async def test_wrong_tls_is_told_at_once_also_to_those_who_would_wait(
    serve_with: ServeWith, authority: Authority, stranger: Authority, resume: bool
) -> None:
    address = at_localhost(await serve_with(ServerSecurity(ServerTls(**authority.issue()))))
    async with AsyncClient(address, tls=Tls(ca_file=stranger.ca_file)) as client, asyncio.timeout(120):
        with pytest.raises(TlsError, match="has signed"):
            await client.generate(prompt="x", max_tokens=1, resume=resume, resume_timeout=3600)
