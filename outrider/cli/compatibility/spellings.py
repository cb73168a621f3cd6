"""Spellings of flags that vLLM takes, as this command line's parser takes them."""

from __future__ import annotations

import json
import re
from typing import Any

_ATTACHED = re.compile(r"(-tp|-pp|-dp|-asc|-O)=?(\d+)")
"""``-tp2``, ``-tp=2``, ``-O3``."""
_SHORT = re.compile(r"(-[a-z]{2,3})=(.*)", re.DOTALL)
_NESTED = re.compile(r"(--speculative-config|-sc)\.([^=]+)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def normalize(args: list[str]) -> list[str]:
    """The words with hyphens, values apart from short flags, one name a flag, and one speculative config."""
    words = [part for word in args for part in _apart(_with_hyphens(word))]
    return _one_speculative_config(each_name_by_its_flag(words))


def whole_number(text: str) -> int:
    """``4096``, ``4k`` (4,000) or ``4K`` (4,096); ``ValueError`` for another text."""
    match = _NUMBER.fullmatch(text.strip())
    number, suffix = match.groups() if match else ("", "")
    if not match or (suffix not in _DECIMAL and "." in number) or (not suffix and "." in number):
        raise ValueError(f"{text!r} is no whole number, such as 4096, 4k (4,000) or 4K (4,096)")
    return int(number) * _BINARY[suffix] if suffix in _BINARY else round(float(number) * _DECIMAL[suffix])


def _with_hyphens(word: str) -> str:
    """``--max_model_len=8`` as ``--max-model-len=8``; keys after a point stay as they are."""
    flag, equals, value = word.partition("=")
    name, point, keys = flag.partition(".")
    return name.replace("_", "-") + point + keys + equals + value if flag.startswith("--") else word


def _apart(word: str) -> list[str]:
    match = _ATTACHED.fullmatch(word) or _SHORT.fullmatch(word)
    return list(match.groups()) if match else [word]


def _one_speculative_config(words: list[str]) -> list[str]:
    """``--speculative-config.KEY VALUE`` of all keys as one JSON object."""
    config: dict[str, Any] = {}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _NESTED.fullmatch(word)
        if match is None:
            kept.append(word)
            continue
        value = next(rest, "") if match[3] is None else match[3]
        config[match[2].replace("-", "_")] = _value(value)
    return [*kept, "--speculative-config", json.dumps(config)] if config else kept


def _value(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text)
    except ValueError:
        return text


def each_name_by_its_flag(args: list[str]) -> list[str]:
    """``--served-model-name a b``, as vLLM takes it, with the flag before each name.

    The words that follow the first name are names too, unless the target is not named before the flags: then it may be
    one of them.
    """
    flag = "--served-model-name"
    names_target = any(word.partition("=")[0] == "--model" for word in args) or not args[:1] or args[0][:1] != "-"
    written: list[str] = []
    takes_names = False
    for word in args:
        if takes_names and not word.startswith("-"):
            # The flag itself is there for the first name.
            written += [word] if written[-1] == flag else [flag, word]
            takes_names = names_target
        else:
            takes_names = word == flag
            written.append(word)
    return written
