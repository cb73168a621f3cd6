"""Names of settings in errors: what was typed for each, and for an unknown key the nearest known one."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outrider.errors import ConfigError

SettingKey = tuple[str, str]
"""(section, key)."""

RENAMED = {"max_prefill_beside": "max_mixed_prefill_tokens", "num_awake_processors": "num_pinned_cpus"}
"""Keys of 0.1.0 that 0.2 still takes: the present key of each."""

_MOST_LISTED = 12
"""Known keys up to which an error lists them."""

_MENTION = re.compile(
    r"(?!\A)(?<![\w./'\"-])(?<!--set )"
    r"(?:(?P<section>target|draft|coordinator|gateway)\.(?P<key>[a-z]\w*)|(?P<bare>[a-z]+(?:_[a-z0-9]+)+))"
    r"(?![\w/'\"-])"
)
"""A setting with its section, or a key of several words; a key of a single word may be any word of a sentence.

What a message begins with is the value that was given, such as a file by the name of ``chat_template``.
"""


@dataclass(frozen=True, slots=True)
class TypedNames:
    """Settings under the names that were typed."""

    names: Mapping[SettingKey, str] = field(default_factory=dict)
    """Setting: its flag, its variable, or the file with its key there; a flag for one that was not given."""
    section: str = ""
    """Section of the settings that errors name without one: that of the process; empty if there are several."""

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Raise a ``ConfigError`` again, with the typed names of the settings that it is about and that it mentions."""
        try:
            yield
        except ConfigError as error:
            section, dot, key = error.field.rpartition(".")
            section = section if dot else self.section
            renamed = ConfigError(self.names.get((section, key), error.field), self._said(error.problem, section))
            if str(renamed) == str(error):
                raise
            raise renamed from error

    def flags_of(self, section: str) -> dict[str, str]:
        """Flag of the section's own service: the typed name, for messages of a process that was started with flags."""
        return {f"--{key.replace('_', '-')}": name for (of, key), name in self.names.items() if of == section}

    def _said(self, message: str, section: str) -> str:
        def name(mention: re.Match[str]) -> str:
            place = (mention["section"] or section, mention["key"] or mention["bare"])
            typed = self.names.get(place, mention[0])
            return mention[0] if ":" in typed else typed  # of a file: its key, without the file once more

        return _MENTION.sub(name, message)


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
    known_ones = f"known are {', '.join(sorted(names))}" if len(names) <= _MOST_LISTED else "outrider config lists them"
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else known_ones
    return ConfigError(f"{prefix}{key}", f"is not a setting; {hint}")
