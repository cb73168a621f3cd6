"""Text load: the text that drafts of new sessions have to be brought, as requests come and go.

A burst's text is a price that is paid once. Where requests come all the time it is a share of the time, and has to be
won back in the rounds in which sessions may draft: those some time after prompts.
"""

from __future__ import annotations

import math

_NEWEST = 0.1
"""Weight of the session that began last."""
_MOST_TOKENS = 1 << 17
"""Of text that is remembered; past it all of it counts half."""
_HORIZON_S = 5.0
"""Seconds of service that the share with drafts is of."""
_LEAST_SHARE = 0.01


class TextLoad:
    """Usual text of a session, and when sessions may draft."""

    def __init__(self) -> None:
        self.num_tokens = 0.0
        """That the draft lacks of a session whose prompt was computed, usually; none of those that come in a burst."""
        self.drafting_share = 1.0
        """Of the time lately, that in which sessions may draft."""
        self._num_brought = self._num_computed = 0.0
        """Tokens of text lately, those that drafts lacked and those that they computed."""

    def note_brought(self, num_tokens: int) -> None:
        """A session's draft holds so many tokens more than at its step before."""
        self._num_brought += num_tokens
        if self._num_brought > _MOST_TOKENS:
            self._num_brought, self._num_computed = self._num_brought / 2, self._num_computed / 2

    def note_computed(self, num_tokens: int) -> None:
        """A forward of a draft took in so many tokens of text."""
        self._num_computed += num_tokens

    @property
    def computed_share(self) -> float:
        """Of the text that drafts are brought, the share that is not in their prefix caches; 1 before any was."""
        return min(self._num_computed / self._num_brought, 1.0) if self._num_brought else 1.0

    def note_begun(self, num_tokens: int, *, is_beside_others: bool) -> None:
        """A session's prompt was computed, and its draft lacks so many tokens; ``is_beside_others``: most sessions are
        in the middle of their output.
        """
        self.num_tokens += _NEWEST * (num_tokens * is_beside_others - self.num_tokens)

    def note_time(self, seconds: float, *, may_draft: bool) -> None:
        """Seconds of service; ``may_draft``: no prompt is computed, nor was just now."""
        weight = -math.expm1(-seconds / _HORIZON_S)
        self.drafting_share += weight * (may_draft - self.drafting_share)

    def drafting_seconds(self, request_s: float) -> float:
        """Of the seconds that a request takes, those in which it may draft."""
        return request_s * max(self.drafting_share, _LEAST_SHARE)
