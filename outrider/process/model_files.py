"""Files of models and tokenizers by name: a folder, or an id of the Hugging Face Hub, from its cache or downloaded.

``require_model_folder`` finds in milliseconds what is plainly wrong; the loader checks the content. Only an id requires
``huggingface_hub``, with its variables ``HF_HOME``, ``HF_HUB_CACHE``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and
``HF_ENDPOINT``. After a killed download it fetches the files anew that were not whole.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.errors import ConfigError, ModelError, install_command
from outrider.limits.bounded_files import MAX_INDEX_BYTES, read_bounded
from outrider.process.draft_methods import with_draft_method

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*.jinja")
_FILES = ("*.json", "tokenizer*", "*.jinja")
_TOKENIZER_FILES = ("config.json", "tokenizer*.json", "special_tokens_map.json", "generation_config.json", *_TEMPLATES)
_WEIGHTS = "*.safetensors"
_IGNORED = ("consolidated*", "original/*")
"""The same weights once more, in another layout."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ANSWER_SECONDS = 10

_REFUSED = 3
_READ_CONFIGURATION = f"""
import sys
from pathlib import Path
from outrider.errors import OutriderError
from outrider.model_executor.models import read_model_config
try:
    read_model_config(Path(sys.argv[1]), sys.argv[2])
except OutriderError as error:
    print(error)
    sys.exit({_REFUSED})
"""

ModelT = TypeVar("ModelT", TargetSettings, DraftSettings)


def is_hub_id(name: str) -> bool:
    """True if a model's name is an id such as "Qwen/Qwen3-8B", and no local file or folder has this name."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def with_local_model(settings: ModelT, *, reads_configuration: bool = False) -> ModelT:
    """Return the settings with a local folder instead of an id of the Hub, keeping the name, and the method that a
    draft's folder names; other settings are unchanged.

    Downloads missing files, with a progress bar on a terminal. ``ModelError`` if the files are not available, or with
    ``reads_configuration`` before weights are downloaded that a target could not be loaded with.
    """
    name = settings.model
    if name is None or (isinstance(settings, DraftSettings) and not settings.method.has_model):
        return settings
    if not is_hub_id(name):
        if settings.revision is not None:
            raise ConfigError(f"{settings.name}.revision", f"is set, and {name} is no id of the Hugging Face Hub")
        return _with_method(settings, name)
    folder = _of_model(settings, name, reads_configuration=reads_configuration).fetch()
    found = {"model": str(folder), "revision": None, "served_model_name": settings.served_model_name or name}
    return _with_method(settings.model_copy(update=found), name)


def _with_method(settings: ModelT, name: str) -> ModelT:
    return with_draft_method(settings, name) if isinstance(settings, DraftSettings) else settings


def require_weights_on_hub(repo_id: str, revision: str | None) -> None:
    """Raise ``ModelError`` if a repository has no weights that are read. Says nothing where the Hub cannot be asked."""
    try:
        from huggingface_hub import HfApi

        files = HfApi().model_info(repo_id, revision=revision, timeout=_ANSWER_SECONDS).siblings or ()
    except Exception as error:  # of the network, the Hub, a missing package: each has its own
        _log.debug("%s: its files are not known: %s", repo_id, error)
        return
    weights = [file.rfilename for file in files if fnmatch.fnmatch(file.rfilename, _WEIGHTS)]
    if not any("/" not in name and not fnmatch.fnmatch(name, _IGNORED[0]) for name in weights):
        raise ModelError(f"{repo_id} on the Hub lacks {_WEIGHTS}, the only weights that are read")


def with_local_tokenizer(settings: CoordinatorSettings) -> CoordinatorSettings:
    """Return the settings with a local folder instead of an id of the Hub as ``tokenizer``. Downloads no weights;
    ``ModelError`` if the files are not available.
    """
    name, revision = settings.tokenizer, settings.tokenizer_revision
    if name is None or not is_hub_id(name):
        if revision is not None:
            problem = "no tokenizer is" if name is None else f"{name} is no id of the Hugging Face Hub"
            raise ConfigError("coordinator.tokenizer_revision", f"is set, and {problem}")
        return settings
    folder = _of_tokenizer(name, revision).fetch()
    return settings.model_copy(update={"tokenizer": str(folder), "tokenizer_revision": None})


@dataclass(frozen=True, slots=True)
class _Repository:
    """The files of a repository on the Hub that a service reads."""

    repo_id: str
    revision: str | None
    setting: str
    """The one that names it."""
    extra: str
    """The extra of outrider with which the Hub is found."""
    patterns: tuple[str, ...]
    """Patterns of the names of the files to download."""
    expected: tuple[str, ...]
    """Files that a folder in the cache must have to be used without asking the Hub."""
    lack: Callable[[Path], str]
    """Files that a folder lacks, in words; empty for a complete one."""
    check: Callable[[Path], None] | None = None
    """Called with a folder without weights before these are downloaded."""

    def fetch(self) -> Path:
        """Return the complete folder in the cache."""
        try:
            import huggingface_hub
        except ImportError as error:
            needed = f"ids of the Hugging Face Hub need huggingface_hub: {install_command(self.extra)}"
            raise ConfigError(self.setting, f"{self.repo_id} is no folder here, and {needed}") from error
        if (folder := self._cached()) is not None:
            return folder
        _log.info("downloading %s from the Hugging Face Hub", self.repo_id)
        if self.check is not None:
            self.check(self._download(huggingface_hub, _FILES))
        folder = self._download(huggingface_hub, self.patterns)
        if lack := self.lack(folder):
            raise self._error(f"{self.repo_id} on the Hub {lack}")
        return folder

    def _download(self, huggingface_hub: ModuleType, patterns: Sequence[str]) -> Path:
        """The folder with the files of some patterns."""
        try:
            with _bars_on_terminals_only():
                found = huggingface_hub.snapshot_download(
                    self.repo_id,
                    revision=self.revision,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(_IGNORED),
                )
        except Exception as error:  # of the network, the Hub, the disk: each has its own
            raise self._error(self._explain(error)) from error
        return Path(found)

    @property
    def kind(self) -> str:
        """A model or a tokenizer."""
        return self.setting.partition(".")[2]

    def _cached(self) -> Path | None:
        """The folder in the cache, if it has all that is needed."""
        from huggingface_hub import try_to_load_from_cache

        files = [try_to_load_from_cache(self.repo_id, name, revision=self.revision) for name in self.expected]
        found = [Path(file).parent for file in files if isinstance(file, str)]
        return found[0] if len(found) == len(files) and not self.lack(found[0]) else None

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.setting.replace('.', ' ')}: {message}")

    def _explain(self, error: Exception) -> str:
        """Advice for the error."""
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        name, page = self.repo_id, f"{constants.ENDPOINT}/{self.repo_id}"
        if isinstance(error, GatedRepoError):
            return f"{name} is gated: accept its terms at {page}, then set HF_TOKEN"
        if isinstance(error, RepositoryNotFoundError):
            return f"{name} is no folder here and no {self.kind} at {constants.ENDPOINT}; a private one needs HF_TOKEN"
        if isinstance(error, RevisionNotFoundError):
            return f"{name} has no revision {self.revision!r}"
        if constants.HF_HUB_OFFLINE:
            return (
                f"{name} is no folder here, and not in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is set: "
                "unset it, or name a folder"
            )
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"{name} is no folder here and not in the cache {constants.HF_HUB_CACHE}, and could not be downloaded from "
            f"{constants.ENDPOINT} ({reason}): without a network, copy the {self.kind} here and name its folder"
        )


def _of_model(settings: TargetSettings | DraftSettings, repo_id: str, *, reads_configuration: bool) -> _Repository:
    needs_weights = settings.load_format == "safetensors"
    is_read = reads_configuration and needs_weights
    return _Repository(
        repo_id,
        settings.revision,
        f"{settings.name}.model",
        "engine",
        patterns=(*_FILES, _WEIGHTS) if needs_weights else _FILES,
        expected=("config.json",),
        lack=partial(_lack_of_model, needs_weights=needs_weights),
        check=partial(_require_readable, model_impl=settings.model_impl) if is_read else None,
    )


def _require_readable(folder: Path, *, model_impl: str) -> None:
    """Raise ``ModelError`` for a configuration that the engine refuses. It reads it in a process of its own, since this
    one may not need torch; loading says what keeps it from being read.
    """
    words = [sys.executable, "-c", _READ_CONFIGURATION, str(folder), model_impl]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode == _REFUSED:
        raise ModelError(f"target model: {ended.stdout.strip()}")


def _of_tokenizer(repo_id: str, revision: str | None) -> _Repository:
    """Tokenizer files; a cache without ``tokenizer_config.json``, which may hold the chat template, is incomplete."""
    return _Repository(
        repo_id,
        revision,
        "coordinator.tokenizer",
        "coordinator",
        patterns=_TOKENIZER_FILES,
        expected=("tokenizer.json", "tokenizer_config.json"),
        lack=lambda folder: "" if (folder / "tokenizer.json").is_file() else "has no tokenizer.json",
    )


def _lack_of_model(folder: Path, *, needs_weights: bool) -> str:
    if not (folder / "config.json").is_file():
        return lack_of_config(folder)
    index = folder / _INDEX
    if not needs_weights or (not index.is_file() and any(folder.glob(_WEIGHTS))):
        return ""
    has_shards = index.is_file() and all((folder / shard).is_file() for shard in _shards(index))
    return "" if has_shards else "lacks *.safetensors"


def lack_of_config(folder: Path) -> str:
    """Words for a folder without config.json."""
    if (folder / "adapter_config.json").is_file():
        return "is an adapter (LoRA), not a model: merge it into its base model and serve that"
    return "has no config.json"


def weight_files(folder: Path) -> list[Path]:
    """The files from which the loader reads a model's weights: those that its index lists, else ``model.safetensors``,
    else all ``*.safetensors``. They need not exist; loading checks them.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        return sorted(folder / name for name in _shards(index))
    return [single] if single.exists() else sorted(folder.glob(_WEIGHTS))


def _shards(index: Path) -> set[str]:
    """Names of the files that a model's index lists; none when it cannot be read, which loading will say."""
    try:
        names = json.loads(read_bounded(index, MAX_INDEX_BYTES))["weight_map"].values()
        return {name for name in names if isinstance(name, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
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


def require_model_folder(folder: Path | str) -> None:
    """Raise ``ModelError`` unless this is a folder with a ``config.json``. Imports no torch."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder: give a folder with config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} {lack_of_config(path)}")
