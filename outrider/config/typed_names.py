"""Names of settings in errors of one process: what was typed for each, a flag, a variable or a key of the file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from outrider.errors import ConfigError

_KEY = re.compile(r"(?<![\w./'\"-])[a-z]+(_[a-z0-9]+)+(?![\w/'\"-])")
"""A key of several words; one of a single word may be any word of a sentence."""


@dataclass(frozen=True, slots=True)
class TypedNames:
    """The settings of one section under the names that were typed."""

    section: str
    names: Mapping[str, str]
    """Setting: its flag, its variable, or the file with its key there; a flag for one that was not given."""

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Raise a ``ConfigError`` about a setting of the section again, under the setting's typed name."""
        try:
            yield
        except ConfigError as error:
            key = error.field.removeprefix(f"{self.section}.")
            if key not in self.names:
                raise
            raise ConfigError(self.names[key], _KEY.sub(self._inside, error.problem)) from error

    def _inside(self, match: re.Match[str]) -> str:
        """Another setting that the message mentions."""
        name = self.names.get(match[0], match[0])
        return match[0] if ":" in name else name  # of a file: its key, without the file once more
