"""State of each choice of a streamed response: characters, tokens, result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.generations import GenerationChoice
from outrider.gateway.responses.usage import count_tokens
from outrider.gateway.served_model import ServedModel
from outrider.generation import Delta, GenerationResult

Json = dict[str, Any]


@dataclass(slots=True)
class ChoiceState:
    """One choice after its latest delta."""

    is_first: bool = False
    """True if that delta was the first."""
    offset: int = 0
    """Characters before its text."""
    num_characters: int = 0
    num_tokens: int = 0
    has_begun: bool = False
    result: GenerationResult | None = None


class ChoiceStates:
    """The choices of one response."""

    def __init__(self, choices: Sequence[GenerationChoice], prompt_lengths: Sequence[int], model: ServedModel) -> None:
        self._states = [ChoiceState() for _ in choices]
        self._prompt_lengths = prompt_lengths
        self._eos = frozenset(model.info.eos_token_ids)

    @property
    def results(self) -> list[GenerationResult]:
        """The results of all choices, after their end."""
        return [state.result for state in self._states if state.result is not None]

    def take(self, choice: GenerationChoice, delta: Delta) -> ChoiceState:
        """Return the state after this delta."""
        state = self._states[choice.index]
        state.is_first, state.has_begun = not state.has_begun, True
        state.offset = state.num_characters
        state.num_characters += len(delta.text)
        state.num_tokens += len(delta.token_ids)
        state.result = delta.result
        return state

    def usage(self, choice: GenerationChoice) -> Json:
        """The current usage of a choice."""
        return count_tokens(self._prompt_lengths[choice.prompt], self._states[choice.index].num_tokens)

    def ending(self, choice: GenerationChoice, result: GenerationResult) -> Json:
        """The finish and stop reason of a choice. As in vLLM, an end of sequence is not a stop reason unless the
        request named the token.
        """
        stop = result.matched_stop
        named = choice.options.get("stop_token_ids") or ()
        is_end = isinstance(stop, int) and stop in self._eos and stop not in named
        return {"finish_reason": result.finish_reason.value, "stop_reason": None if is_end else stop}
