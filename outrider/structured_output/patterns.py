"""Patterns of texts (``pattern``, ``patternProperties``) in a form that the engine keeps to; that of ``regex``."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ESCAPE = r"\\[pP](?:\{[^}]*\}|.)|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\."
_ITEM = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_CLASS_END = re.compile(r"\\.|\]", re.DOTALL)
_TERM = re.compile(rf"\[(?P<negated>\^?)(?P<items>\]?(?:\\.|[^\]\\])*)\]|{_ESCAPE}|\x00", re.DOTALL)
"""A class or an escape. A bracket that comes first in a class belongs to it."""
_OUTSIDE = re.compile(rf"{_ESCAPE}|\x00", re.DOTALL)
"""An escape where no class ends later."""
_NUL = r"\x00"
_NULS = frozenset((_NUL, r"\u0000", "\0"))
_WIDE = {r"\D": r"\p{Nd}", r"\W": r"\p{L}\p{N}_", r"\S": r"\s\x1c-\x1f\x85\xa0\ufeff"}
"""Characters that are digits, of words or spaces in one of the dialects: the engine takes those of ASCII alone."""
_SPECIAL = frozenset("[]&~")
"""Characters of operations on sets, which only the engine's classes have."""
_ALSO_PLAIN = {r"\<": "<", r"\>": ">"}
"""Escapes that only the engine gives a meaning."""
_LITERAL = r"[A-Za-z0-9 _@#%&=:;,!<>~'/-]"
_ATOM = rf"(?:{_LITERAL}|\.|\\[dDwWsSnrt.*+?()|\\/^$-]|\\[\[\]{{}}]|\[\^?(?:[a-z]|A-Z|a-z|0-9|\\[dws.\\-])+\])"
_QUANTIFIER = r"(?:[*+?]|\{[0-9]{1,2},?\})?"


def engine_pattern(pattern: str) -> str:
    r"""The pattern in the engine's dialect, accepting no more than in those of ECMAScript and of Python.

    No class holds NUL: llguidance 1.9.1 takes one of all control characters to hold ``"`` and ``\``, whatever it says
    of these.
    """
    ends = [found.end() for found in _CLASS_END.finditer(pattern) if found[0] == "]"]
    last = ends[-1] if ends else 0  # brackets that nothing closes would each be searched to the end
    return _TERM.sub(_rewritten, pattern[:last]) + _OUTSIDE.sub(lambda term: _escape(term[0]), pattern[last:])


def _rewritten(term: re.Match[str]) -> str:
    items, is_negated = term["items"], bool(term["negated"])
    if items is None:
        return _escape(term[0])
    return _class(_ITEM.findall(items), is_negated=is_negated) if items or is_negated else term[0]


def _escape(text: str) -> str:
    if text in _WIDE or text in _NULS or text[:2] in (r"\p", r"\P"):
        return _class([text], is_negated=False)
    return _ALSO_PLAIN.get(text, text)


def _class(items: Sequence[str], *, is_negated: bool) -> str:
    found: list[str] = []
    for item in items:
        if is_negated and item.upper() in _WIDE and item.islower():
            found.append(_WIDE[item.upper()])
        elif item in _WIDE and not is_negated and item.lower() not in items:
            found.append(f"[^{_WIDE[item]}]")
        elif item in _SPECIAL or (item == "-" and (not found or found[-1] == "-")):
            found.append(f"\\{item}")
        else:
            found.append(_ALSO_PLAIN.get(item, item))
    if is_negated:
        return f"[^{_NUL}{''.join(found)}]"
    may_hold_nul = any(item in _NULS or item[:2] in (r"\p", r"\P") for item in items)
    return f"[{''.join(found)}{f'&&[^{_NUL}]' if may_hold_nul else ''}]"


def _sequence(atom: str) -> str:
    repeated = f"(?:{atom}{_QUANTIFIER})*"
    return rf"{repeated}(?:\|{repeated})*"


_GROUP = rf"\((?:\?:)?{_sequence(_ATOM)}\)"
_REGEXES = rf"^\^?{_sequence(f'(?:{_ATOM}|{_GROUP})')}\$?$"
"""Pattern of regular expressions that are valid in all dialects: literals, escapes, classes, quantifiers and groups one
deep.
"""


def _reference(*, begins: str, others: str = "") -> str:
    """Pattern of URI references. ``begins``: their scheme. ``others``: characters beside those of ASCII."""
    one = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@{others}-]|%[0-9A-Fa-f]{{2}})"
    later, tail = rf"(?:/(?:{one}|:)*)*", rf"(?:{one}|[:/?])*"
    path = rf"(?://[A-Za-z0-9.{others}-]+(?::[0-9]{{1,5}})?{later}|/?{one}+{later}|/)?"
    return rf"^{begins}{path}(?:\?{tail})?(?:#{tail})?$"


_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:"
_WIDER = r"\u00a0-\ud7ff"
_STEPS = r"(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = r"[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?"
_CENTURY_YEARS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
    "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_CENTURY_YEARS}|{_CENTURY_YEARS}00)-02-29)"
)
"""A day that the Gregorian calendar has, of the years from 1 on."""
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR})"
FORMATS = {
    name: engine_pattern(pattern)
    for name, pattern in {
        "regex": _REGEXES,
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "uri-reference": _reference(begins=f"(?:{_SCHEME})?"),
        "iri": _reference(begins=_SCHEME, others=_WIDER),
        "iri-reference": _reference(begins=f"(?:{_SCHEME})?", others=_WIDER),
        "uri-template": rf"^(?:[A-Za-z0-9._~!$&()*+,;=:/?#@-]|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
        "json-pointer": f"^{_STEPS}$",
        "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_STEPS})$",
    }.items()
}
"""Patterns of formats that the engine does not know, or of which it accepts more: 29 February of any year."""
