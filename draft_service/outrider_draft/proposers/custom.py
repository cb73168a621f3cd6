"""A user's own proposer, named as ``module:Class``; ``base`` shows one. Imports no torch."""

from __future__ import annotations

import importlib

from outrider.config import DraftSettings
from outrider.errors import ConfigError
from outrider_draft.proposers.base import Proposer
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """The class that ``draft.proposer`` names, served."""
    path = settings.proposer or ""
    return without_kv(find_class(path).load(settings), settings, name=path)


def find_class(path: str) -> type[Proposer]:
    """The class of a ``module:Class``; ``ConfigError`` says why there is none."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            message = f"{path}: there is no module {error.name} on the draft service's PYTHONPATH"
            raise ConfigError("draft.proposer", message) from error
        raise
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Proposer)):
        of_it = "has no class" if found is None else "is no subclass of outrider_draft.proposers.base.Proposer:"
        raise ConfigError("draft.proposer", f"{path}: {module_name} {of_it} {class_name}")
    return found
