"""Step values: dataclasses made for every session in every step, frozen to the type checker alone.

At run time a frozen dataclass sets each field through ``object.__setattr__``: with eight fields its constructor takes
some twenty times as long, which was a fifth to a third of what a coordinator does between an answer and the next
command (docs/decisions/forwards.md). Values that are made less often are plain frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

__all__ = ["step_value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as step_value
else:
    ClassT = TypeVar("ClassT", bound=type)

    def step_value(*, frozen: bool, slots: bool) -> Callable[[ClassT], ClassT]:
        """``dataclass(frozen=True, slots=True)``, with equality and hash, whose assignments only mypy refuses."""
        return dataclass(slots=slots, unsafe_hash=frozen)
