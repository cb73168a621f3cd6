"""A user's own proposer, named as ``module:Class``; ``base`` shows one. Imports no torch."""

from __future__ import annotations

import importlib
import inspect

from outrider.config import DraftSettings
from outrider.errors import ConfigError
from outrider_draft.proposers.base import Proposer
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv

_BASE = "outrider_draft.proposers.base.Proposer"


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """The class that ``draft.proposer`` names, served."""
    path = settings.proposer or ""
    return without_kv(make_proposer(path, settings), settings, name=path)


def make_proposer(path: str, settings: DraftSettings) -> Proposer:
    """Proposer of a class's ``load``; ``ConfigError`` where that returns something else."""
    found = find_class(path)
    try:
        proposer: object = found.load(settings)
    except TypeError as error:
        if not inspect.isabstract(found):
            raise
        lacking = ", ".join(sorted(found.__abstractmethods__))
        message = f"{path}: {found.__name__} should define {lacking}, as subclasses of {_BASE} do"
        raise ConfigError("draft.proposer", message) from error
    if not isinstance(proposer, Proposer):
        message = f"{path}: {found.__name__}.load should return a {found.__name__}, a subclass of {_BASE}, and gave"
        raise ConfigError("draft.proposer", f"{message} {type(proposer).__name__}")
    return proposer


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
        of_it = "has no class" if found is None else f"is no subclass of {_BASE}:"
        raise ConfigError("draft.proposer", f"{path}: {module_name} {of_it} {class_name}")
    return found
