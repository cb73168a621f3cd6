"""Errors for unknown keys, with the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from outrider.errors import ConfigError


def check_known(
    keys: Iterable[str], known: Iterable[str], *, prefix: str = "", suggested: Iterable[str] | None = None
) -> None:
    """Raise ``ConfigError`` for the first of ``keys`` that is not among ``known``; it suggests one of ``suggested``,
    which are ``known`` unless given.
    """
    names = list(known)
    suggested = names if suggested is None else list(suggested)
    for key in keys:
        if key not in names:
            raise unknown(key, suggested, prefix=prefix)


def unknown(key: str, known: Iterable[str], *, prefix: str = "") -> ConfigError:
    """Return the error for an unknown key; ``prefix`` precedes the key and the suggestion."""
    names = list(known)
    # Dashes and case are the likeliest slips; they should not hide what is otherwise the same name.
    plain = key.lower().replace("-", "_")
    # A name with a word before it (speculative_model) is nearer than another that shares this word.
    ends = sorted((name for name in names if plain.endswith(f"_{name}")), key=len, reverse=True)
    nearest = (
        ends
        or difflib.get_close_matches(plain, names, n=1, cutoff=0.5)
        or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    )
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known are {', '.join(sorted(names))}"
    return ConfigError(f"{prefix}{key}", f"is not a setting; {hint}")
