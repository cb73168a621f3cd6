"""Errors for unknown keys, with the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from outrider.errors import ConfigError


def check_known(keys: Iterable[str], known: Iterable[str], *, prefix: str = "") -> None:
    """Raise ``ConfigError`` for the first of ``keys`` that is not among ``known``."""
    names = list(known)
    for key in keys:
        if key not in names:
            raise unknown(key, names, prefix=prefix)


def unknown(key: str, known: Iterable[str], *, prefix: str = "") -> ConfigError:
    """Return the error for an unknown key; ``prefix`` precedes the key and the suggestion."""
    names = list(known)
    # Dashes and case are the likeliest slips; they should not hide what is otherwise the same name.
    nearest = difflib.get_close_matches(key.lower().replace("-", "_"), names, n=1, cutoff=0.5) or (
        difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    )
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known are {', '.join(sorted(names))}"
    return ConfigError(f"{prefix}{key}", f"is not a setting; {hint}")
