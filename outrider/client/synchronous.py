"""The client for plain Python."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Self, Unpack

from outrider.client.access import client_security
from outrider.client.requests import GenerateOptions, build_request
from outrider.generation import Delta, GenerationRequest, GenerationResult, ModelInfo
from outrider.tls import Tls
from outrider.transport.remote_generation import BlockingGeneration


class Client:
    """Talks to the coordinator at ``address`` ("host:port" or "unix:/path"); connects when first used.

    Safe to use from several threads.
    """

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
        self._remote = BlockingGeneration(address, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """Generate and return once. Options: ``GenerateOptions``. Raises ``OutriderError`` and nothing else."""
        request, timeout = build_request(options)
        return self._remote.generate(request, timeout_s=timeout)

    def stream(self, **options: Unpack[GenerateOptions]) -> Generator[Delta, None, None]:
        """Generate and yield deltas, the last with the result; leaving the loop early cancels the request.

        Bad options are refused at once, not when the first delta is asked for.
        """
        request, timeout = build_request(options)
        return self._deltas(request, timeout)

    def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        return self._remote.model_info()

    def close(self) -> None:
        """End running calls and let go of the connection."""
        self._remote.close()

    def _deltas(self, request: GenerationRequest, timeout: float | None) -> Generator[Delta, None, None]:
        yield from self._remote.stream(request, timeout_s=timeout)
