"""Registry of proposers: a draft's method, by vLLM's name, and what the service runs for it.

A new method is a ``load`` of the same form in a module beside this one, an entry in ``LOADERS`` and a member of
``DraftMethod``. Modules are imported when their method is asked for, so that lookups need no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from outrider import __version__
from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError
from outrider.kv_cache import PrefixCache
from outrider.ports import Extend, Proposal
from outrider.process.model_files import is_hub_id, require_model_folder
from outrider.serving.executor import Executor
from outrider.serving.in_process.engine_thread import OnFailure
from outrider.serving.session import SequenceStore
from outrider.types import ModelDescription
from outrider_draft.proposers.base import Proposer
from outrider_draft.proposers.text.text_executor import TextExecutor
from outrider_draft.texts import PlainSequences

if TYPE_CHECKING:
    from outrider.model_executor.cuda_graphs import CaptureProgress
    from outrider.model_executor.device_setup import DeviceFacts
    from outrider.model_executor.loader.weights import Progress
    from outrider.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """Callbacks during the loading of a proposer."""

    progress: Progress | None = None
    """Bytes of weights."""
    capture_progress: CaptureProgress | None = None
    """CUDA graphs."""
    on_failure: OnFailure | None = None
    """Another rank of the model was lost."""


@dataclass(frozen=True, slots=True)
class ServedProposer:
    """A proposer, and what the service has to know to run it."""

    executor: Executor[Any, Extend, Any, Proposal]
    sequences: SequenceStore[Any]
    """State and pages of its sessions."""
    description: ModelDescription
    max_cached_tokens: int = 0
    """Tokens that its KV cache has room for; 0: it has none."""
    runner: ModelRunner | None = None
    """None for a draft without a model."""
    prefix_cache: PrefixCache | None = None
    """Prefix cache of a proposer without a ``runner``."""
    close: Callable[[], None] | None = None
    """Called once nothing computes any more."""


Loader: TypeAlias = "Callable[[DraftSettings, LoadHooks], ServedProposer]"

LOADERS: Mapping[DraftMethod, str] = {
    DraftMethod.DRAFT_MODEL: "outrider_draft.proposers.draft_model",
    DraftMethod.DFLASH: "outrider_draft.proposers.heads",
    DraftMethod.EAGLE: "outrider_draft.proposers.heads",
    DraftMethod.EAGLE3: "outrider_draft.proposers.heads",
    DraftMethod.MEDUSA: "outrider_draft.proposers.medusa",
    DraftMethod.MLP_SPECULATOR: "outrider_draft.proposers.mlp_speculator",
    DraftMethod.MTP: "outrider_draft.proposers.heads",
    DraftMethod.NGRAM: "outrider_draft.proposers.text.ngram",
    DraftMethod.SUFFIX: "outrider_draft.proposers.text.suffix",
    DraftMethod.CUSTOM_CLASS: "outrider_draft.proposers.custom",
}
"""The module of each method; its ``load`` is a ``Loader``."""


def load_proposer(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """Proposer of the settings' method; ``ConfigError`` or ``ModelError`` where it cannot be loaded."""
    path = LOADERS.get(settings.method)
    if path is None:
        raise ConfigError("draft.method", f"{settings.method} is no draft; drafts are {', '.join(LOADERS)}")
    require_target(settings)
    load = cast("Loader", importlib.import_module(path).load)
    return load(settings, hooks)


def require_target(settings: DraftSettings) -> None:
    """Raise ``ConfigError`` for a head that takes embedding or last product from a target that is not named."""
    if settings.method.reads_target and settings.target_model is None:
        raise ConfigError("draft.target_model", f"is needed by method {settings.method}: the target's folder")


def check_settings(settings: DraftSettings) -> None:
    """Raise ``ConfigError`` if the settings select no draft, ``ModelError`` if the model's folder is invalid."""
    if settings.method is DraftMethod.NONE:
        raise ConfigError(
            "draft.method", f"must be one of {', '.join(LOADERS)}, or module:Class, for a draft to be served"
        )
    if settings.method.needs_model and not is_hub_id(settings.model or ""):
        require_model_folder(settings.model or "")
    require_target(settings)
    if settings.target_model is not None and settings.method.reads_target:
        require_model_folder(settings.target_model)


def without_kv(
    proposer: Proposer, settings: DraftSettings | None = None, name: str = "", *, device: DeviceFacts | None = None
) -> ServedProposer:
    """A proposer that keeps no KV, served; ``name`` is what it is called in the description. ``device`` is where it
    computes, if that is a device that others may share.
    """
    facts: DeviceFacts = device or {"device": "", "device_id": "", "device_name": ""}
    description = ModelDescription(
        role="draft",
        model_name=(settings.served_model_name if settings else None) or name,
        architecture="",
        vocab_size=proposer.vocab_size,
        num_token_ids=proposer.vocab_size,
        max_model_len=proposer.max_model_len,
        version=__version__,
        **facts,
        hidden_size=proposer.hidden_size,
        hidden_state_layers=proposer.hidden_state_layers,
    )
    return ServedProposer(TextExecutor(proposer), PlainSequences(), description, close=proposer.close)
