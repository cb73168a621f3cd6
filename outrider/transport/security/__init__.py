"""Transport security: TLS from files that may be rotated, and bearer tokens.

Reads and checks certificate and token files, and explains connection failures that they cause.
"""

from outrider.transport.security.settings import link_security, public_security, service_security
from outrider.transport.security.sides import OPEN_CLIENT, OPEN_SERVER, ClientSecurity, ServerSecurity
from outrider.transport.security.tls import ServerTls, client_credentials
from outrider.transport.security.tokens import TokenFile, TokenInterceptor

__all__ = [
    "OPEN_CLIENT",
    "OPEN_SERVER",
    "ClientSecurity",
    "ServerSecurity",
    "ServerTls",
    "TokenFile",
    "TokenInterceptor",
    "client_credentials",
    "link_security",
    "public_security",
    "service_security",
]
