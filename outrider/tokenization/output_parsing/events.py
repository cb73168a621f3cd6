"""Events of output parsers, and the interface of a parser."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call; ``CallArguments`` follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the JSON text of the current call's arguments."""

    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Incremental parser of one output."""

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back. Nothing may be pushed afterwards."""


def split_at(text: str, markers: Collection[str], *, is_final: bool) -> tuple[str, str, str]:
    """Text before the first marker, the marker, and the text after it.

    Without a marker, the second is empty and the third is the end of the text that a marker may begin with; it is empty
    for the final text.
    """
    found = [(position, -len(marker), marker) for marker in markers if (position := text.find(marker)) >= 0]
    if found:
        position, _, marker = min(found)
        return text[:position], marker, text[position + len(marker) :]
    num_held = 0 if is_final else max(_overlap(text, marker) for marker in markers)
    kept = len(text) - num_held
    return text[:kept], "", text[kept:]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that is a beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
