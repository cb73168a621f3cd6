"""Settings of security that only make sense together, and the variables of clients."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cli.stack.preflight import check_hops
from outrider.config import CoordinatorSettings, Settings, TargetSettings, load, load_all
from outrider.config.client import client_environment
from outrider.errors import ConfigError


def target(*flags: str) -> TargetSettings:
    return load(TargetSettings, ["--model", "/m", *flags], {})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tls-cert-file", "c"], "--tls-key-file: is needed together with --tls-cert-file"),
        (["--tls-key-file", "k"], "--tls-cert-file: is needed together with --tls-key-file"),
        (["--tls-client-ca-file", "a"], "--tls-cert-file: is needed with --tls-client-ca-file"),
        (["--health-port", "0"], "--health-port: should be greater than or equal to 1"),
    ],
)
def test_what_lacks_its_other_half_names_it(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        target(*flags)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--link-tls-cert-file", "c", "--link-tls-key-file", "k"],
            "--link-tls-ca-file: is needed with --link-tls-cert",
        ),
        (["--link-tls-server-name", "n"], "--link-tls-ca-file: is needed with --link-tls-server-name"),
        (["--link-tls-ca-file", "a", "--link-tls-key-file", "k"], "--link-tls-cert-file: is needed together with"),
        (["--tls-cert-file", "c"], "--tls-key-file: is needed together with --tls-cert-file"),
        (["--max-connection-age-s", "0"], "--max-connection-age-s: should be greater than 0"),
        (["--channels-between-hosts", "--no-direct-proposals"], "--channels-between-hosts: needs --direct-proposals"),
    ],
)
def test_the_coordinators_too(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(CoordinatorSettings, flags, {})
    assert told in str(caught.value)


def settings(**places: str) -> Settings:
    flags: dict[tuple[str, str], Any] = {("target", "model"): "/m", ("draft", "method"): "ngram"}
    for place, value in places.items():
        section, _, key = place.partition("__")
        flags[section, key] = value
    return load_all(flags, environ={}).settings


def test_serve_says_which_end_of_a_hop_lacks_what_the_other_has() -> None:
    check_hops(settings())
    pair = {"target__tls_cert_file": "c", "target__tls_key_file": "k"}
    with pytest.raises(ConfigError, match=r"coordinator\.link_tls_ca_file: is needed, since target\.tls_cert_file"):
        check_hops(settings(**pair))
    with pytest.raises(ConfigError, match=r"draft\.tls_cert_file: is needed, since coordinator\.link_tls_ca_file"):
        check_hops(settings(**pair, coordinator__link_tls_ca_file="a"))
    with pytest.raises(ConfigError, match=r"coordinator\.link_token_file: is needed, since draft\.link_token_file"):
        check_hops(settings(draft__link_token_file="t"))
    check_hops(settings(draft__host="unix:/run/d", **pair, coordinator__link_tls_ca_file="a"))


def test_variables_of_clients_are_none_of_a_services() -> None:
    environ = {"OUTRIDER_API_TOKEN": "t", "OUTRIDER_TLS_CA_FILE": "/ca", "OUTRIDER_COORDINATOR_PORT": "7000"}
    assert load(CoordinatorSettings, [], environ).port == 7000
    found = client_environment(environ)
    assert (found.token, found.tls, found.tls_ca_file, found.allow_plaintext_token) == ("t", True, "/ca", False)
    assert not client_environment({"OUTRIDER_TLS_CA_FILE": "", "OUTRIDER_TLS": "0"}).tls
