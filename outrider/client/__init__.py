"""The SDK: ``Client`` and ``AsyncClient``.

Owns what a user's code calls. Values are those of ``outrider.generation``, errors those of ``outrider.errors``; no
type of gRPC or protobuf is seen.
"""

from outrider.client.asynchronous import AsyncClient
from outrider.client.requests import GenerateOptions
from outrider.client.synchronous import Client
from outrider.tls import Tls

__all__ = ["AsyncClient", "Client", "GenerateOptions", "Tls"]
