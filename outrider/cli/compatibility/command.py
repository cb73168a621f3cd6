"""The command of ``outrider serve``: vLLM's flags become options, a line, or an error with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

from outrider.cli.compatibility import table
from outrider.cli.compatibility.spellings import normalize
from outrider.cli.help import GroupedCommand
from outrider.cli.options import progress
from outrider.cli.typed import note_typed

_ANY = "*"


@dataclass(frozen=True, slots=True)
class Rule:
    """Meaning of a flag that is no option here, or an option with other values."""

    reason: str
    takes_value: bool
    harmless: frozenset[str] = frozenset()
    """Values that are passed over; empty text for a switch that is."""
    is_option: bool = False
    """True if other values are the option's."""


class ServeCommand(GroupedCommand):
    """A command that understands vLLM's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of a library typer brings itself
        """Parse; a flag of vLLM's without effect is passed over with a line, one that is not offered is an error."""
        normalized = normalize(args)
        note_typed(ctx, normalized)
        words = iter(normalized)
        kept = [kept for word in words for kept in translate(ctx, word, words)]
        return list(super().parse_args(ctx, kept))


def translate(ctx: Any, word: str, rest: Iterator[str]) -> list[str]:  # noqa: ANN401
    """The words that stand for a flag, whose value may be the next of ``rest``."""
    flag, equals, value = word.partition("=")
    if flag in table.SETTING_SWITCHES:
        return _set(table.SETTING_SWITCHES[flag].split())
    if flag in table.SETTINGS:
        value = value if equals else _next(ctx, flag, rest)
        return _set([f"{place}={value}" for place in table.SETTINGS[flag].split()])
    rule = rules().get(flag.partition(".")[0])
    if rule is None:
        return [word]
    if rule.takes_value and not equals and (rule.harmless or rule.is_option):
        value = _next(ctx, flag, rest)
    if _ANY in rule.harmless or value in rule.harmless:
        shown = f"{flag} {value}".rstrip()
        progress.print(f"{shown} has no effect: {rule.reason}", markup=False, style="dim")
        return []
    if rule.is_option:
        return [flag, value]
    raise typer.BadParameter(f"{_but(rule)}{rule.reason}.", ctx=ctx, param_hint=flag)


def _but(rule: Rule) -> str:
    if not (rule.takes_value and rule.harmless):
        return "is not supported: "
    return f"should be {' or '.join(sorted(rule.harmless))}, or left out: "


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _next(ctx: Any, flag: str, rest: Iterator[str]) -> str:  # noqa: ANN401
    value = next(rest, None)
    if value is None:
        raise typer.BadParameter("needs a value.", ctx=ctx, param_hint=flag)
    return value


@cache
def rules() -> Mapping[str, Rule]:
    """Flag: its rule."""
    found: dict[str, Rule] = {}
    passed, refused = frozenset({""}), frozenset[str]()
    for reason, flag in _each(table.ALWAYS_ON):
        found[flag] = Rule(reason, False, passed)
        found |= {negation: Rule(reason, False, refused) for negation in _negations(flag)}
    for reason, flag in _each(table.ALWAYS_OFF):
        found |= {negation: Rule(reason, False, passed) for negation in _negations(flag)}
        found[flag] = Rule(reason, False, refused)
    for reason, entry in _each(table.VALUES):
        flag, _, values = entry.partition("=")
        found[flag] = Rule(reason, True, frozenset(filter(None, values.split("|"))))
    for reason, entry in _each(table.DEFAULTS):
        flag, _, values = entry.partition("=")
        found[flag] = Rule(reason, bool(values), frozenset(values.split("|")), is_option=bool(values))
    return found


def _each(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((reason, entry) for reason, entries in reasons.items() for entry in entries.split())


def _negations(flag: str) -> Iterator[str]:
    """``--no-x`` of each, and ``--disable-x`` of ``--enable-x`` as well as the other way round."""
    if not flag.startswith("--"):
        return
    yield f"--no-{flag[2:]}"
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(one):
            yield other + flag.removeprefix(one)
