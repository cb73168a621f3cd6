"""Optional dependencies: the extras that each command requires, checked before anything is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import ConfigError, install_command

EXTRAS: dict[str, tuple[str, ...]] = {
    "coordinator": ("numpy", "tokenizers", "jinja2", "llguidance", "grpc_health", "grpc_reflection"),
    "engine": (
        *("torch", "transformers", "safetensors", "numpy", "tokenizers", "llguidance", "grpc_health"),
        "grpc_reflection",
    ),
    "gateway": ("starlette", "uvicorn", "httptools", "tokenizers", "jinja2"),
    "telemetry": ("prometheus_client", "opentelemetry.sdk"),
}
"""Extra: modules that it brings, as far as their lack would stop a process."""

_PACKAGES = {
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
}
"""Module: the package that has it, where that has another name."""


def require_extras(names: Iterable[str], what: str, *, optional: Iterable[str] = ()) -> None:
    """Raise a ``ConfigError`` that names all missing packages of the extras and the extras; ``what`` requires them.
    Missing ``optional`` ones are named together with others, and are no error alone.
    """
    missing = _missing(names)
    if missing:
        missing |= _missing(optional)
        packages = list(dict.fromkeys(package for lacking in missing.values() for package in lacking))
        verb = "is" if len(packages) == 1 else "are"
        problem = f"{what} needs {_listed(packages)}, which {verb} not installed: {install_command(','.join(missing))}"
        raise ConfigError("", problem)


def require_all(*checks: Callable[[], None]) -> None:
    """Run all checks and raise one ``ConfigError`` with what each of them says."""
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("", "; ".join(problems))


def exit_without_extras(names: Iterable[str], what: str) -> None:
    """End the process with one line and exit code 1 where ``require_extras`` raises: for a service's main module, which
    asks before it imports what the extras bring.
    """
    try:
        require_extras(names, what)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def missing_packages(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [_PACKAGES.get(module, module) for module in EXTRAS[extra] if is_missing(module)]


def is_missing(module: str) -> bool:
    """True if a module is not installed; imports only the packages that it is in."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of the package that it is in
        return True


def _missing(names: Iterable[str]) -> dict[str, list[str]]:
    """Extra: its missing packages; without the extras of which none is missing."""
    return {name: packages for name in names if (packages := missing_packages(name))}


def _listed(words: Sequence[str]) -> str:
    """A, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
