"""SDK client for synchronous code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from outrider.client.access import client_security
from outrider.client.addresses import Addresses, named_addresses
from outrider.client.attempts import Attempts
from outrider.client.batches import MAX_CONCURRENCY, ManyPrompts, OnePrompt, each_request, with_prompt
from outrider.client.documented import with_options_of
from outrider.client.requests import DEFAULTS, GenerateOptions, build_request, max_retries, resume_timeout
from outrider.client.resuming import Generation, ResumableGeneration, SingleGeneration
from outrider.errors import OutriderError, ProtocolError
from outrider.generation import Delta, GenerationResult, ModelInfo, TokenizerFiles
from outrider.tls import Tls
from outrider.transport.remote_generation import BlockingGeneration

ResultT = TypeVar("ResultT")


class Client:
    """Client of the coordinator at ``address`` ("host:port" or "unix:/path"); connects at the first call.

    Several addresses ("a:1", "b:2"; a list; "a:1,b:2") are coordinators of one model: the first that answers is used,
    and one that failed is tried last for a while. Thread-safe.
    """

    def __init__(
        self,
        address: str | Iterable[str] | None = None,
        *more: str,
        tls: Tls | bool | None = None,
        token: str | Callable[[], str | None] | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        """Client of ``address``. Without it the variable ``OUTRIDER_ADDRESS`` is used, or 127.0.0.1:50050. Without
        ``tls`` and ``token``, the variables ``OUTRIDER_TLS_*`` and ``OUTRIDER_API_TOKEN`` are used.

        Raises ``ConfigError`` for unusable files, or for a token that would leave this machine without TLS.
        """
        security = client_security(tls, token, allow_plaintext_token=allow_plaintext_token)
        self._addresses = Addresses(named_addresses(address, *more))
        attempt_ms = self._addresses.connect_attempt_ms
        self._remotes = {
            name: BlockingGeneration(name, security, connect_attempt_ms=attempt_ms) for name in self._addresses.names
        }
        self._num_closed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def generate(
        self, prompt: OnePrompt = None, /, *, n: None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: OnePrompt = None, /, *, n: int, **options: Unpack[GenerateOptions]
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self, prompt: ManyPrompts, /, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[GenerationResult]: ...

    @with_options_of(GenerateOptions, DEFAULTS)
    def generate(
        self,
        prompt: OnePrompt | ManyPrompts = None,
        /,
        *,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Generate text and return the result. Raises only ``OutriderError``.

        ``prompt`` is a text or token ids. With a list of prompts, or with ``n`` generations of each, the results are a
        list, prompt by prompt: a limited number of requests run at the same time, and the first error ends the call.
        The seeds of the ``n`` generations of a prompt count up from ``seed``.
        """
        singles = each_request(prompt, n, options)
        if singles is None:
            return self._generate(with_prompt(cast(OnePrompt, prompt), options))
        with ThreadPoolExecutor(min(len(singles), MAX_CONCURRENCY), "outrider-generate") as pool:
            try:
                return list(pool.map(self._generate, singles))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _generate(self, options: GenerateOptions) -> GenerationResult:
        request, timeout = build_request(options)
        attempts = self._attempts(timeout, limit := resume_timeout(options), retries=max_retries(options))
        if limit is None:
            return self._call(attempts, lambda remote, left: remote.generate(request, timeout_s=left))
        for delta in self._deltas(ResumableGeneration(request), attempts):
            if delta.result is not None:
                return delta.result
        raise ProtocolError("the stream ended without a result")

    @with_options_of(GenerateOptions, DEFAULTS)
    def stream(self, prompt: OnePrompt = None, /, **options: Unpack[GenerateOptions]) -> Generator[Delta, None, None]:
        """Generate text and yield deltas, the last with the result; leaving the loop early cancels the request.

        Invalid options raise at once, before the first delta is requested. With ``resume=True`` an interruption is a
        pause: no output is repeated or lost, and the result covers all calls.
        """
        options = with_prompt(prompt, options)
        request, timeout = build_request(options)
        attempts = self._attempts(timeout, limit := resume_timeout(options), retries=max_retries(options))
        return self._deltas(SingleGeneration(request) if limit is None else ResumableGeneration(request), attempts)

    @with_options_of(GenerateOptions, DEFAULTS, without=("prompt", "prompt_token_ids"))
    def chat(
        self, messages: Sequence[Mapping[str, Any]] | None = None, /, **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """Answer a conversation and return the result. The model's chat template renders the prompt.

        ``messages``: dictionaries as in the OpenAI API, oldest first. Options and errors: those of ``generate``. To
        stream the answer: ``stream(messages=messages)``.
        """
        if messages is not None:
            options["messages"] = messages
        return self._generate(options)

    def model_info(self) -> ModelInfo:
        """Return facts about the served models."""
        return self._call(self._attempts(), lambda remote, _: remote.model_info())

    def tokenizer_files(self, *, known_sha256: str = "") -> TokenizerFiles:
        """Return the files of the model's tokenizer and chat templates; no files if their hash is ``known_sha256``."""
        return self._call(self._attempts(), lambda remote, _: remote.tokenizer_files(known_sha256))

    def close(self) -> None:
        """Cancel running calls and close the connections."""
        self._num_closed += 1
        for remote in self._remotes.values():
            remote.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._addresses.names))})"

    def _attempts(
        self, timeout: float | None = None, resume_timeout_s: float | None = None, *, retries: int = 0
    ) -> Attempts:
        num_closed = self._num_closed
        return Attempts(
            self._addresses,
            timeout_s=timeout,
            resume_timeout_s=resume_timeout_s,
            is_closed=lambda: self._num_closed != num_closed,
            max_retries=retries,
        )

    def _call(self, attempts: Attempts, call: Callable[[BlockingGeneration, float | None], ResultT]) -> ResultT:
        while True:
            address, left = attempts.begin()
            try:
                result = call(self._remotes[address], left)
            except OutriderError as error:
                time.sleep(attempts.failed(error))
            else:
                attempts.note_message(is_output=True)
                return result

    def _deltas(self, generation: Generation, attempts: Attempts) -> Generator[Delta, None, None]:
        while True:
            address, left = attempts.begin()
            stream = self._remotes[address].stream(generation.next_request(), timeout_s=left)
            try:
                with contextlib.closing(stream):
                    for delta in stream:
                        given = generation.take(delta)
                        attempts.note_message(is_output=given is not None)
                        if given is not None:
                            yield given
                return
            except OutriderError as error:
                pause = attempts.failed(error)
            time.sleep(pause)
