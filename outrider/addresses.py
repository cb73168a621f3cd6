"""Addresses of servers: their form, their parts, and sockets that listen on them.

A host is a name, an IPv4 address, or an IPv6 address with or without brackets. In an address with a port IPv6 has
brackets: ``[::1]:50050``.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from outrider.errors import ConfigError

MAX_PORT = 65_535
_URL = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)


def form_problem(address: str) -> str:
    """Error text for an address; empty if it is "host:port" with a valid port, or "unix:/path".

    gRPC would take a port above 65535 modulo 65536 and connect to another server.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return ""
    if _URL.match(address):
        return "should be host:port of gRPC, such as 127.0.0.1:50050, and no URL"
    host, port = split_address(address)
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        return f"should be host:port with a port from 1 to {MAX_PORT}, or unix:/path"
    if is_ipv6(host) and not address.startswith("["):
        return f"should have an IPv6 address in brackets, as in [{host}]:{port}"
    return f"should be host:port with a valid host: it {problem}" if (problem := host_problem(host)) else ""


def is_ipv6(host: str) -> bool:
    """True if a host without brackets is an IPv6 address."""
    return ":" in host and not host.startswith("unix:")


def bare_host(host: str) -> str:
    """Host without the brackets of an IPv6 address, which gets its shortest spelling; IPv4 in it becomes IPv4."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not is_ipv6(bare):
        return bare
    try:
        address = ipaddress.IPv6Address(bare)
    except ValueError:
        return bare
    return str(address.ipv4_mapped or address)


def host_problem(host: str) -> str:
    """Error text for a host without brackets; empty if it is a name, an IP address or "unix:/path"."""
    if not is_ipv6(host):
        return "should be a host without brackets, except for IPv6" if "[" in host or "]" in host else ""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return "should be a host alone, such as 127.0.0.1, ::1 or unix:/path, without a port"
    return ""


def is_loopback(host: str) -> bool:
    """True if what goes to or comes from a host never leaves this machine."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, str]:
    """Host, without brackets, and port of "host:port"; the port is empty without one."""
    host, _, port = address.rpartition(":")
    return bare_host(host), port


def join_address(host: str, port: int) -> str:
    """Host and port as one address; a host "unix:/path" is the whole of it."""
    if host.startswith("unix:"):
        return host
    host = bare_host(host)
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """Host by which a process on this machine reaches a server that listens on ``host``."""
    host = bare_host(host)
    if host in {"::", "0.0.0.0"}:
        return "::1" if host == "::" else "127.0.0.1"
    return host


def listening_socket(host: str, port: int, *, reuse_port: bool = False, backlog: int | None = None) -> socket.socket:
    """A listening socket; "::" takes IPv4 too. ``OSError`` if there can be none."""
    host = bare_host(host)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port), family=family, reuse_port=reuse_port, backlog=backlog, dualstack_ipv6=is_dual
    )


def check_address(address: str, *, setting: str = "address") -> str:
    """Return the address; ``ConfigError`` that names the ``setting`` unless it has a valid form."""
    if problem := form_problem(address):
        raise ConfigError(setting, f"{problem}, not {address!r}")
    return address


def check_listening(host: str, port: int, *, port_setting: str, host_setting: str, hint: str = "") -> None:
    """Check that a server could listen here; ``ConfigError`` names the setting that is in the way otherwise."""
    if host.startswith("unix:"):
        return
    host = bare_host(host)
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: an address still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            failure = listening_error(
                host, port, error, port_setting=port_setting, host_setting=host_setting, hint=hint
            )
            raise failure from error


def listening_error(
    host: str, port: int, error: OSError, *, port_setting: str, host_setting: str, hint: str = ""
) -> ConfigError:
    """The error for an address that cannot be listened on: of its port, or of a host on which no port could be.

    A port of 0 is any. ``hint`` follows what is said of a port.
    """
    if error.errno == errno.EADDRINUSE:
        return ConfigError(port_setting, f"{join_address(host, port)} is in use{hint}")
    where = join_address(host, port) if port else host
    reason = f"{where} cannot be listened on: {error.strerror or error}"
    if error.errno == errno.EACCES:
        return ConfigError(port_setting, f"{reason}; ports below 1024 may need privileges{hint}")
    return ConfigError(host_setting, f"{reason}; it should be an address of this host")
