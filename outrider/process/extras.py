"""Optional dependencies: the extras that each command requires, checked before anything is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from outrider.errors import ConfigError, install_command

EXTRAS: dict[str, tuple[str, ...]] = {
    "coordinator": ("numpy", "tokenizers", "jinja2", "grpc_health", "grpc_reflection"),
    "engine": ("torch", "transformers", "safetensors", "numpy", "tokenizers", "grpc_health", "grpc_reflection"),
    "gateway": ("starlette", "uvicorn", "tokenizers", "jinja2"),
    "telemetry": ("prometheus_client", "opentelemetry.sdk"),
}
"""Extra: modules that it brings, as far as their lack would stop a process."""


def require_extras(names: Iterable[str], what: str, *, optional: Iterable[str] = ()) -> None:
    """Raise a ``ConfigError`` that names the extras whose modules are missing; ``what`` requires them. Missing
    ``optional`` ones are named together with others, and are no error alone.
    """
    missing = _missing(names)
    if missing:
        missing |= _missing(optional)
        extras, modules = ",".join(missing), list(dict.fromkeys(missing.values()))
        verb = "is" if len(modules) == 1 else "are"
        problem = f"{what} needs {' and '.join(modules)}, which {verb} not installed: {install_command(extras)}"
        raise ConfigError("", problem)


def exit_without_extras(names: Iterable[str], what: str) -> None:
    """End the process with one line and exit code 1 where ``require_extras`` raises: for a service's main module, which
    asks before it imports what the extras bring.
    """
    try:
        require_extras(names, what)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def _missing(names: Iterable[str]) -> dict[str, str]:
    """Extra: the first of its modules that is missing."""
    return {name: lacking for name in names if (lacking := next(filter(_is_missing, EXTRAS[name]), ""))}


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of the package that it is in
        return True
