"""Users who always have a request open: as one ends the next begins, and its prompt goes in chunks beside decoding.

Other than in bursts prompts come all the time, and each request's text is brought to its draft while others decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_coordinator.speculation import LONGEST_INLINE_FEED, ControlledSession
from tests.coordinator.speculation.served_bursts import Served
from tests.coordinator.speculation.simulated_load import H200

_CHUNK = 512
"""Tokens of prompts in a forward."""
_PROMPT_MS = 0.028
"""Target's time for one prompt."""
_EMPTY_FORWARD_MS = 0.6


@dataclass
class _Prompt:
    """A prompt that waits for the target."""

    session: ControlledSession
    num_left: int
    num_output_tokens: int
    is_for_both: bool
    """True if the draft computes it at the same time."""


class ServedArrivals(Served):
    """One coordinator's requests on a pair, of users who always have one."""

    def __init__(
        self,
        pair: H200,
        acceptance: float,
        *,
        seed: int,
        length: int | None = None,
        num_prompt_tokens: int,
        num_output_tokens: int = 256,
        num_cached_tokens: int = 0,
        is_cold: bool = False,
    ) -> None:
        """Arguments as for ``Served``; tokens are those of each request. ``num_cached_tokens``: of its prompt, in the
        prefix caches of target and draft.
        """
        super().__init__(pair, acceptance, seed=seed, length=length, is_cold=is_cold)
        self.num_tokens = 0
        """Output tokens so far."""
        self.num_text_tokens = 0
        """Prompt tokens that drafts prefilled."""
        self._num_prompt_tokens, self._num_output_tokens = num_prompt_tokens, num_output_tokens
        self._num_cached_tokens = num_cached_tokens
        self._random = np.random.default_rng(seed)
        self._prompts: list[_Prompt] = []

    def serve(self, num_users: int, seconds: float) -> float:
        """Output tokens a second, once a fifth of the time has passed. At first users are somewhere in a request."""
        began, counted_from = self.devices.now, 0
        for _ in range(num_users):
            self._arrive(int(self._random.integers(2, self._num_output_tokens)))
        while (passed := self.devices.now - began) < seconds:
            if passed < seconds / 5:
                counted_from, counted_since = self.num_tokens, self.devices.now
            if self._prompts:
                self._round_with_prompts()
            else:
                self._round()
            while len(self._left) + len(self._prompts) < num_users:
                self._arrive(self._num_output_tokens)
        return (self.num_tokens - counted_from) / (self.devices.now - counted_since)

    def _arrive(self, num_output_tokens: int) -> None:
        session = ControlledSession(self._limit, max_tokens=num_output_tokens)
        length = self._num_prompt_tokens
        self.controller.enter(session)
        is_for_both = session.limit > 0 and (not self.is_chosen or self.controller.will_draft(length))
        self._lags[session] = -1 if is_for_both else length
        self._texts[session] = self._random.random(num_output_tokens)
        self._prompts.append(_Prompt(session, length - self._num_cached_tokens, num_output_tokens, is_for_both))

    def _round_with_prompts(self) -> None:
        """A chunk beside the rows that decode, by the lengths of the commands that have left."""
        num_taken, for_drafts = 0, 0
        for prompt in self._prompts:
            num_now = min(prompt.num_left, _CHUNK - num_taken)
            prompt.num_left -= num_now
            num_taken += num_now
            for_drafts += num_now if prompt.is_for_both else 0
        begun = [prompt for prompt in self._prompts if not prompt.num_left]
        self._prompts = [prompt for prompt in self._prompts if prompt.num_left]
        rows = list(self._left)
        lengths = [self._length_of(session) for session in rows]
        draft, target, whole = self.devices.round_ms(lengths) if rows else (0.0, 0.0, _EMPTY_FORWARD_MS)
        prompts_ms = _PROMPT_MS * num_taken
        self.devices.now += (whole + prompts_ms + self.devices.pair.prefill(for_drafts)) / 1e3
        self._left |= {prompt.session: prompt.num_output_tokens for prompt in begun}
        if every := rows + [prompt.session for prompt in begun]:
            lengths += [0] * len(begun)
            self._tell(every, lengths, draft, target + prompts_ms, tokens=len(every) + sum(lengths) + num_taken)

    def _length_of(self, session: ControlledSession) -> int:
        lacks_text = self.is_chosen and self._lags[session] > LONGEST_INLINE_FEED
        return 0 if lacks_text else self._asked_length(session)

    def _bring_text(self, session: ControlledSession, room: int) -> int:
        num_tokens = super()._bring_text(session, room)
        self.num_text_tokens += num_tokens
        return num_tokens

    def _computed(self, session: ControlledSession, lag: int) -> int:
        return max(super()._computed(session, lag) - self._num_cached_tokens, 0)

    def _accepted(self, session: ControlledSession, length: int) -> int:
        accepted = super()._accepted(session, length) if length else 0
        self.num_tokens += accepted + 1
        return accepted
