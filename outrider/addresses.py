"""Addresses: the form of a server's, and why one cannot be listened on."""

from __future__ import annotations

import errno
import re
import socket

from outrider.errors import ConfigError

MAX_PORT = 65_535
_URL = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)


def form_problem(address: str) -> str:
    """What an address should be; empty if it is "host:port" with a valid port, or "unix:/path".

    gRPC would take a port above 65535 modulo 65536 and connect to another server.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return ""
    if _URL.match(address):
        return "should be host:port of gRPC, such as 127.0.0.1:50050, and no URL"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        return f"should be host:port with a port from 1 to {MAX_PORT}, or unix:/path"
    return ""


def check_address(address: str, *, setting: str = "address") -> str:
    """Return the address; ``ConfigError`` that names the ``setting`` unless it has a valid form."""
    if problem := form_problem(address):
        raise ConfigError(setting, f"{problem}, not {address!r}")
    return address


def check_listening(host: str, port: int, *, port_setting: str, host_setting: str, hint: str = "") -> None:
    """Check that a server could listen here; ``ConfigError`` names the setting that is in the way otherwise."""
    if host.startswith("unix:"):
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: an address still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            told = listening_error(host, port, error, port_setting=port_setting, host_setting=host_setting, hint=hint)
            raise told from error


def listening_error(
    host: str, port: int, error: OSError, *, port_setting: str, host_setting: str, hint: str = ""
) -> ConfigError:
    """The error for an address that cannot be listened on: of its port, or of a host on which no port could be.

    A port of 0 is any. ``hint`` follows what is said of a port.
    """
    if error.errno == errno.EADDRINUSE:
        return ConfigError(port_setting, f"{host}:{port} is in use{hint}")
    where = f"{host}:{port}" if port else host
    reason = f"{where} cannot be listened on: {error.strerror or error}"
    if error.errno == errno.EACCES:
        return ConfigError(port_setting, f"{reason}; ports below 1024 may need privileges{hint}")
    return ConfigError(host_setting, f"{reason}; it should be an address of this host")
