"""Cache of the served model: facts, tokenizer and chat templates, fetched from a coordinator and refreshed.

Owns the refresh. After the first fetch no request waits for it: a stale value is used during a refresh.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider.errors import InvalidRequestError, ModelNotFoundError, OutriderError, UnavailableError
from outrider.gateway.responses.error_responses import shortened
from outrider.generation import ModelInfo, TokenizerFiles
from outrider.limits import ModelLimits
from outrider.tokenization import ModelText, TextTokenizer, TokenText, TokenTexts

_log = logging.getLogger(__name__)
_FRESH_S = 5.0
"""Age up to which the model's facts are used without asking again."""
_ASK_TIMEOUT_S = 5.0
_NO_TEXT = TokenText("", b"")


class ModelSource(Protocol):
    """Source of the model's facts: the SDK's client."""

    async def model_info(self) -> ModelInfo:
        """Return facts about the served models."""

    async def tokenizer_files(self, *, known_sha256: str = "") -> TokenizerFiles:
        """Return the files of the tokenizer; none if the known hash matches."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The gateway's data about the model."""

    info: ModelInfo
    names: tuple[str, ...]
    """Names that requests may use, the first in answers."""
    text: ModelText
    token_texts: TokenTexts | None
    created: int = field(default_factory=lambda: int(time.time()))
    """Creation time in seconds since 1970."""

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model."""
        return ModelLimits(self.info.num_token_ids, self.info.max_model_len)

    def check_name(self, name: str | None) -> str:
        """The model name of responses; ``ModelNotFoundError`` for an unknown name."""
        if name and name not in self.names:
            raise self.not_found(name)
        return name or self.names[0]

    def not_found(self, name: str) -> ModelNotFoundError:
        """The error for an unknown name, of which it shows the beginning."""
        return ModelNotFoundError(f"The model `{shortened(name)}` does not exist; served: {', '.join(self.names)}")

    def require_tokenizer(self, field_name: str = "prompt") -> TextTokenizer:
        """The tokenizer; ``InvalidRequestError`` naming the field that requires one."""
        if self.text.tokenizer is None:
            raise InvalidRequestError(field_name, "cannot be used, since the model has no tokenizer; send token ids")
        return self.text.tokenizer

    def check_ids(self, field_name: str, token_ids: Sequence[int]) -> None:
        """Raise ``InvalidRequestError`` naming the first id that the model does not have."""
        most = self.info.num_token_ids
        if token_ids and max(token_ids) >= most:
            wrong = next(token_id for token_id in token_ids if token_id >= most)
            raise InvalidRequestError(field_name, f"token id {wrong} is not from 0 to {most - 1}")

    def token_text(self, token_id: int) -> TokenText:
        """The text of a token; empty without a tokenizer."""
        return _NO_TEXT if self.token_texts is None else self.token_texts.of(token_id)


class ModelWatch:
    """The current served model. Belongs to one event loop."""

    def __init__(
        self, source: ModelSource, *, names: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``names``: what requests call the model; by default what the coordinator calls it."""
        self._source, self._names, self._clock = source, names, clock
        self._model: ServedModel | None = None
        self._asked_at = 0.0
        self._asking: asyncio.Task[ServedModel] | None = None

    async def current(self) -> ServedModel:
        """The model; ``OutriderError`` if it was never fetched and no coordinator answers."""
        if self._model is None:
            return await self.ask()
        if self._clock() - self._asked_at > _FRESH_S:
            self._refresh()
        return self._model

    async def ask(self) -> ServedModel:
        """Fetch the model from a coordinator; raises ``OutriderError`` if none answers in time."""
        try:
            # Several requests share one question; one that is cancelled does not end it for the others.
            return await asyncio.wait_for(asyncio.shield(self._begin_asking()), _ASK_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"no coordinator answered within {_ASK_TIMEOUT_S:g} s") from None

    def _refresh(self) -> None:
        """Fetch the model again, behind the requests. A failure is logged once, however many requests wait."""
        if self._asking is None or self._asking.done():
            self._begin_asking().add_done_callback(_note_failure)

    def _begin_asking(self) -> asyncio.Task[ServedModel]:
        if self._asking is None or self._asking.done():
            self._asked_at = self._clock()
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> ServedModel:
        info = await self._source.model_info()
        names, known = self._names or (info.target_model,), self._model
        files = await self._source.tokenizer_files(known_sha256=known.text.files.sha256 if known else "")
        if known is not None and files.sha256 == known.text.files.sha256:
            self._model = replace(known, info=info, names=names)
        else:
            self._model = await asyncio.to_thread(_make_model, info, names, files)
        return self._model


def _make_model(info: ModelInfo, names: tuple[str, ...], files: TokenizerFiles) -> ServedModel:
    text = ModelText.from_files(files.files, bos_token_id=files.bos_token_id)
    text = replace(text, files=files)
    return ServedModel(info, names, text, None if text.tokenizer is None else TokenTexts(text.tokenizer.backend))


def _note_failure(asking: asyncio.Task[ServedModel]) -> None:
    error = None if asking.cancelled() else asking.exception()
    if isinstance(error, OutriderError):
        _log.warning("no coordinator describes the model: %s", error)
    elif error is not None:
        _log.error("the model could not be described", exc_info=error)
