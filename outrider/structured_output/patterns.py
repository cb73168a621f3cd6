"""Patterns of texts (``pattern``, ``patternProperties``) in a form that the engine keeps to; that of ``regex``."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\\.|\[\^?|\]|.", re.DOTALL)
_NUL = r"\x00"
_LITERAL = r"[A-Za-z0-9 _@#%&=:;,!<>~'/-]"
_ATOM = rf"(?:{_LITERAL}|\.|\\[dDwWsSnrt.*+?()|\\/^$-]|\\[\[\]{{}}]|\[\^?(?:[a-z]|A-Z|a-z|0-9|\\[dws.\\-])+\])"
_QUANTIFIER = r"(?:[*+?]|\{[0-9]{1,2},?\})?"


def engine_pattern(pattern: str) -> str:
    r"""The pattern, with a NUL in its negated classes: llguidance 1.9.1 takes a class of all control characters to
    hold ``"`` and ``\``, whatever it says of these.
    """
    found, is_class = [], False
    for part in _PARTS.findall(pattern):
        opens = part[0] == "[" and not is_class
        found.append(f"{part}{_NUL}" if opens and part == "[^" else part)
        is_class = opens or (is_class and part != "]")
    return "".join(found)


def _sequence(atom: str) -> str:
    repeated = f"(?:{atom}{_QUANTIFIER})*"
    return rf"{repeated}(?:\|{repeated})*"


_GROUP = rf"\((?:\?:)?{_sequence(_ATOM)}\)"
REGEXES = rf"^\^?{_sequence(f'(?:{_ATOM}|{_GROUP})')}\$?$"
"""Pattern of regular expressions that are valid in all dialects: literals, escapes, classes, quantifiers and groups one
deep.
"""
