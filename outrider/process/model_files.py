"""Model files by name: a folder, or an id of the Hugging Face Hub, from its cache or downloaded.

The loader checks the content. Only an id requires ``huggingface_hub``, with its variables ``HF_HOME``,
``HF_HUB_CACHE``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from outrider.config import DraftSettings, TargetSettings
from outrider.errors import ConfigError, ModelError

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ("*.json", "tokenizer*", "*.jinja")
_WEIGHTS = "*.safetensors"
_IGNORED = ("consolidated*", "original/*")
"""The same weights once more, in another layout."""
_INDEX = "model.safetensors.index.json"

ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)


def is_hub_id(name: str) -> bool:
    """Whether a model's name is an id such as "Qwen/Qwen3-8B", and no local file or folder has this name."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def with_local_model(settings: ModelT) -> ModelT:
    """Return the settings with a local folder instead of an id of the Hub, keeping the name; other settings are
    unchanged.

    Downloads missing files, with a progress bar on a terminal. ``ModelError`` if the files are not available.
    """
    name = settings.model
    if name is None or (isinstance(settings, DraftSettings) and not settings.method.has_model):
        return settings
    if not is_hub_id(name):
        if settings.revision is not None:
            raise ConfigError(f"{settings.name}.revision", f"is set, and {name} is no id of the Hugging Face Hub")
        return settings
    needs_weights = settings.load_format == "safetensors"
    folder = _Repository(name, settings.revision, needs_weights=needs_weights).fetch(settings.name)
    found = {"model": str(folder), "revision": None, "served_model_name": settings.served_model_name or name}
    return settings.model_copy(update=found)


class _Repository:
    """The files of one model on the Hub that a service reads."""

    def __init__(self, repo_id: str, revision: str | None, *, needs_weights: bool) -> None:
        self._repo_id, self._revision, self._needs_weights = repo_id, revision, needs_weights

    def fetch(self, role: str) -> Path:
        """Return the complete folder in the cache."""
        try:
            import huggingface_hub
        except ImportError as error:
            needed = "ids of the Hugging Face Hub need huggingface_hub: install outrider[engine]"
            raise ConfigError(f"{role}.model", f"{self._repo_id} is no folder here, and {needed}") from error
        if (folder := self._cached()) is not None:
            return folder
        patterns = [*_FILES, *([_WEIGHTS] if self._needs_weights else [])]
        _log.info("downloading %s from the Hugging Face Hub", self._repo_id)
        try:
            with _bars_on_terminals_only():
                folder = Path(
                    huggingface_hub.snapshot_download(
                        self._repo_id, revision=self._revision, allow_patterns=patterns, ignore_patterns=list(_IGNORED)
                    )
                )
        except Exception as error:  # of the network, the Hub, the disk: each has its own
            raise ModelError(f"{role} model: {self._explain(error)}") from error
        if not self._is_complete(folder):
            raise ModelError(f"{role} model: {self._repo_id} on the Hub has no config.json, or lacks *.safetensors")
        return folder

    def _cached(self) -> Path | None:
        """The folder in the cache, if it has all that is needed."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self._repo_id, "config.json", revision=self._revision)
        folder = Path(found).parent if isinstance(found, str) else None
        return folder if folder is not None and self._is_complete(folder) else None

    def _is_complete(self, folder: Path) -> bool:
        if not (folder / "config.json").is_file():
            return False
        if not self._needs_weights:
            return True
        index = folder / _INDEX
        if not index.is_file():
            return any(folder.glob(_WEIGHTS))
        return all((folder / shard).is_file() for shard in _shards(index))

    def _explain(self, error: Exception) -> str:
        """What a person can do about it."""
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        name, page = self._repo_id, f"{constants.ENDPOINT}/{self._repo_id}"
        if isinstance(error, GatedRepoError):
            return f"{name} is gated: accept its terms at {page}, then set HF_TOKEN"
        if isinstance(error, RepositoryNotFoundError):
            return f"{name} is no folder here and no model at {constants.ENDPOINT}; a private one needs HF_TOKEN"
        if isinstance(error, RevisionNotFoundError):
            return f"{name} has no revision {self._revision!r}"
        if constants.HF_HUB_OFFLINE:
            return (
                f"{name} is no folder here, and not in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is set: "
                "unset it, or name a folder"
            )
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"{name} is no folder here and not in the cache {constants.HF_HUB_CACHE}, and could not be downloaded from "
            f"{constants.ENDPOINT} ({reason}): without a network, copy the model here and name its folder"
        )


def _shards(index: Path) -> set[str]:
    """Names of the files that a model's index lists; none when it cannot be read, which loading will say."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """A service's output is one JSON object a line."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
