"""Flags of a command line under the names that were typed, and errors that name them.

The SDK names its options in errors, and a client its settings; a person at a terminal knows flags and variables.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import typer

from outrider.errors import ConfigError, InvalidRequestError

_TYPED = "outrider.typed"
"""Key of a context's ``meta``."""
_OPTION = re.compile(r"(?<![\w./'\"-])[a-z]+(?:_[a-z0-9]+)+(?![\w/'\"-])")
"""An option of several words; one of a single word may be any word of a sentence."""


@dataclass(frozen=True, slots=True)
class Typed:
    """The flags of a command line, as they were spelled."""

    flags: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each option."""

    def spelling(self, option: str) -> str:
        """The name under which an option was given; its first one if it was not."""
        names = self.names.get(option, (f"--{option.replace('_', '-')}",))
        return next((name for name in names for flag in self.flags if _is(name, flag)), names[0])


def note_typed(ctx: Any, words: Sequence[str]) -> None:  # noqa: ANN401 - of a library typer brings itself
    """Keep the flags among a command's words; the first call counts, since a command may rewrite them."""
    ctx.meta.setdefault(_TYPED, tuple(word.partition("=")[0] for word in words if word.startswith("-")))


def typed_flags(ctx: Any) -> Typed:  # noqa: ANN401
    """The flags of a command's words, or the variables that were set instead."""
    names = {each.name: (*each.opts, *each.secondary_opts) for each in _options(ctx)}
    names |= {each.name: (each.envvar,) for each in _options(ctx) if _is_from_variable(ctx, each)}
    return Typed(ctx.meta.get(_TYPED, ()), names)


@contextlib.contextmanager
def named_as_typed(ctx: Any) -> Iterator[None]:  # noqa: ANN401
    """Raise errors about options of a command, and about fields of requests that have its options' names, again with
    the flags.
    """
    try:
        yield
    except (ConfigError, InvalidRequestError) as error:
        typed = typed_flags(ctx)
        if error.field not in typed.names:
            raise
        flags = {option: typed.spelling(option) for option in typed.names}
        problem = _OPTION.sub(lambda match: flags.get(match[0], match[0]), error.problem)
        raise type(error)(flags[error.field], problem) from error


@contextlib.contextmanager
def values_as_typed(ctx: Any, words: Sequence[str]) -> Iterator[None]:  # noqa: ANN401
    """Raise a parser's error about the value of an option again, with the flag and the value that were typed."""
    try:
        yield
    except typer.BadParameter as error:
        option = getattr(error.param, "name", None)
        problem, found, _ = error.message.partition(", unable to ")
        if option is None or not (found or problem.startswith("Input ")):
            raise
        flag = typed_flags(ctx).spelling(option)
        value = _value_of(flag, words)
        message = f"{problem.removeprefix('Input ')}{'' if value is None else f', not {value!r}'}"
        raise typer.BadParameter(message, ctx=ctx, param_hint=flag) from error


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value that was typed for a flag, the last one, which counts; None where it is not found."""
    value: str | None = None
    for word, following in zip_longest(words, words[1:]):
        name, equals, attached = word.partition("=")
        if name == flag:
            value = attached if equals else following
        elif not flag.startswith("--") and not word.startswith("--") and word.startswith(flag):
            value = word.removeprefix(flag)
    return value


def _options(ctx: Any) -> list[Any]:  # noqa: ANN401
    return [each for each in ctx.command.params if each.param_type_name == "option"]


def _is_from_variable(ctx: Any, option: Any) -> bool:  # noqa: ANN401
    source = ctx.get_parameter_source(option.name)
    return source is not None and source.name == "ENVIRONMENT"


def _is(name: str, flag: str) -> bool:
    """True if a word is this flag; the value of a short one may be attached, as in ``-k4``."""
    return flag == name or (not name.startswith("--") and not flag.startswith("--") and flag.startswith(name))
