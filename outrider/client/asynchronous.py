"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, Unpack

from outrider.client.access import client_security
from outrider.client.requests import GenerateOptions, build_request
from outrider.generation import Delta, GenerationResult, ModelInfo
from outrider.tls import Tls
from outrider.transport.remote_generation import RemoteGeneration


class AsyncClient:
    """Talks to the coordinator at ``address`` ("host:port" or "unix:/path"); connects when first used."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | bool | None = None,
        token: str | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        """Without ``tls`` and ``token`` the variables ``OUTRIDER_TLS_*`` and ``OUTRIDER_API_TOKEN`` decide.

        ``ConfigError`` for files of no use, or a token that would leave this machine without TLS.
        """
        security = client_security(tls, token, allow_plaintext_token=allow_plaintext_token)
        self._remote = RemoteGeneration(address, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """Generate and return once. Options: ``GenerateOptions``. Raises ``OutriderError`` and nothing else."""
        request, timeout = build_request(options)
        return await self._remote.generate(request, timeout_s=timeout)

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Delta, None]:
        """Generate and yield deltas, the last with the result; leaving the loop early cancels the request.

        Bad options are refused at once, not when the first delta is asked for. ``contextlib.aclosing`` cancels at a
        place of your choice.
        """
        request, timeout = build_request(options)
        return self._remote.stream(request, timeout_s=timeout)

    async def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        return await self._remote.model_info()

    async def close(self) -> None:
        """End running calls and let go of the connection."""
        await self._remote.close()
