"""Checks of the draft's settings before it is loaded. Imports no torch."""

from __future__ import annotations

from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError
from outrider.process.model_files import is_hub_id, require_model_folder
from outrider_draft.proposers.registry import LOADERS, require_target


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
