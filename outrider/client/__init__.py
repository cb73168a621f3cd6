"""Python SDK: ``Client`` and ``AsyncClient``.

Values are those of ``outrider.generation`` and errors those of ``outrider.errors``; gRPC and protobuf types are not
exposed.
"""

from outrider.client.asynchronous import AsyncClient
from outrider.client.requests import GenerateOptions
from outrider.client.synchronous import Client
from outrider.tls import Tls

__all__ = ["AsyncClient", "Client", "GenerateOptions", "Tls"]
