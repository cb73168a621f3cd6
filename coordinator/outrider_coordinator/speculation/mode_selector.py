"""The switch between plain and speculative decoding of one target, with hysteresis in seconds.

Switching costs time: drafts have to be brought the text that they lack, and a target begins to compute ahead only after
a few plain steps. So the mode changes once the time lost in the current one, compared with the other, exceeds the price
of the switch (the ski rental rule: at most twice the loss of a controller that knows the future). A mode that is hardly
better takes over late, one that is much better soon, and two equal modes never alternate.
"""

from __future__ import annotations

import enum
from collections import deque
from itertools import accumulate
from operator import itemgetter

_MIN_GAIN = {True: 0.03, False: 0.01}
"""Least gain for which a switch is made: to speculation, and to plain decoding."""


class Mode(enum.StrEnum):
    """Decoding mode of a target's sessions."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"

    @property
    def other(self) -> Mode:
        """The other of the two."""
        return Mode.PLAIN if self is Mode.SPECULATIVE else Mode.SPECULATIVE


_SWITCH_ROUNDS = {Mode.PLAIN: 6.0, Mode.SPECULATIVE: 10.0}
"""Price of a switch to each mode, in plain rounds."""
_TOKENS_A_ROUND = 600.0
"""Tokens of text that a draft takes in during a plain round, until it was seen how many it does."""
_LEAST_TEXT = 64
"""Tokens of a forward from which on it tells what taking in text costs."""
_NUM_TEXTS, _NUM_TEXT_TOKENS = 8, 8192
"""Latest of these forwards that are kept: a number, and more of them where they had fewer tokens together. Many small
ones end a text in whose large ones a token took a tenth of the time.
"""


_QUICK_SHARE = 0.25
"""Of the tokens of these forwards, those that took least: they say what one takes."""


class SwitchPrice:
    """Seconds that a switch costs; to speculation also those in which drafts are brought the text that they lack."""

    def __init__(self) -> None:
        self._texts: deque[tuple[int, float]] = deque()
        """Tokens of each forward, and the seconds of one of them."""
        self._num_tokens = 0

    def note_text(self, num_tokens: int, seconds: float) -> None:
        """A forward of the draft took in so many tokens of text; small ones say nothing.

        The quickest count: on a device that both models share a forward may wait for one of the target, which is
        that one's time, and a small one takes hardly less than a large one.
        """
        if num_tokens < _LEAST_TEXT or seconds <= 0.0:
            return
        self._texts.append((num_tokens, seconds / num_tokens))
        self._num_tokens += num_tokens
        while len(self._texts) > _NUM_TEXTS and self._num_tokens - self._texts[0][0] >= _NUM_TEXT_TOKENS:
            self._num_tokens -= self._texts.popleft()[0]

    def seconds(self, mode: Mode, plain_seconds: float, draft_lag: int) -> float:
        """Of a switch to ``mode``; ``draft_lag``: tokens that all drafts together lack."""
        price = _SWITCH_ROUNDS[mode] * plain_seconds
        if mode is Mode.PLAIN:
            return price
        return price + self.text_seconds(plain_seconds, draft_lag)

    def text_seconds(self, plain_seconds: float, draft_lag: int) -> float:
        """Of bringing the drafts so many tokens of text."""
        return draft_lag * (self._seconds_a_token() if self._texts else plain_seconds / _TOKENS_A_ROUND)

    def _seconds_a_token(self) -> float:
        """The most that any of the quickest tokens took."""
        num_quick = _QUICK_SHARE * self._num_tokens
        quickest = sorted(self._texts, key=itemgetter(1))
        seen = accumulate(num_tokens for num_tokens, _ in quickest)
        return next(each for (_, each), num_seen in zip(quickest, seen, strict=True) if num_seen >= num_quick)


class ModeSelector:
    """The current mode, and the loss against the other one."""

    def __init__(self) -> None:
        self.mode = Mode.SPECULATIVE
        self.num_switches = 0
        self._loss_s = 0.0
        self._observed_at: float | None = None

    def observe(self, now: float, rates: dict[Mode, float], price_s: float, *, is_free: bool = False) -> bool:
        """Whether the mode changes, given the expected tokens a second of both and the price of the switch in seconds.

        ``is_free``: the switch costs nothing now, so the better mode is taken at once.
        """
        current, other = rates[self.mode], rates[self.mode.other]
        gain = other / current - 1.0 if current > 0.0 else 0.0
        interval_s = 0.0 if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        self._loss_s = max(0.0, self._loss_s + interval_s * gain)
        if gain <= _MIN_GAIN[self.mode is Mode.PLAIN] or not (is_free or self._loss_s > price_s):
            return False
        self.switch()
        return True

    def switch(self, *, is_counted: bool = True) -> None:
        """Change the mode."""
        self.mode, self._loss_s = self.mode.other, 0.0
        self.num_switches += is_counted

    def pause(self, now: float) -> None:
        """Time until now does not count: no mode is in effect, as while prompts are computed."""
        self._observed_at = now
