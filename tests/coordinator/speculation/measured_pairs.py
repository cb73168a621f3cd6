"""Pairs of models as stage times of an H200 as measured under load, harder on speculation than ``H200``'s, and an H100.

Measured with an 8B target, a 1B draft and an EAGLE-3 head: forwards of 1 to 256 rows, draft steps of 1, 8 and 32, and
what lies between the forwards of 1, 8 and 32 users. The other points are inter- or extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.coordinator.speculation.simulated_load import H200, interpolate


@dataclass(frozen=True)
class MeasuredPair(H200):
    """A 1B draft beside the target, on one card or on a card of its own."""

    def target(self, rows: int, tokens: int) -> float:
        plain = ((1, 4.07), (8, 4.15), (32, 4.4), (64, 5.0), (128, 6.7), (256, 11.0))
        scoring = ((2, 4.55), (6, 4.65), (48, 4.93), (128, 5.69), (192, 6.4), (320, 9.8), (640, 16.0))
        return interpolate(plain, rows) if tokens == rows else interpolate(scoring, tokens)

    def draft(self, rows: int, length: int) -> float:
        step = interpolate(((1, 0.81), (8, 0.96), (32, 1.15), (128, 2.1)), rows)
        return 0.1 + length * step if length else 0.0

    def between(self, rows: int) -> float:
        return interpolate(((1, 1.4), (8, 2.5), (32, 3.7), (128, 6.5)), rows)

    def prefill(self, tokens: int) -> float:
        return 0.01 * tokens


@dataclass(frozen=True)
class MeasuredHead(MeasuredPair):
    """An EAGLE-3 head beside the target."""

    reads_states: bool = True

    def draft(self, rows: int, length: int) -> float:
        return 0.3 + length * interpolate(((1, 0.3), (32, 0.4), (128, 0.8)), rows) if length else 0.0

    def prefill(self, tokens: int) -> float:
        return 0.027 * tokens


@dataclass(frozen=True)
class MeasuredTargetOverTwoCards(MeasuredPair):
    """The target over two cards and the draft on one of them."""

    num_cards: int = 2

    def target(self, rows: int, tokens: int) -> float:
        plain = ((1, 3.12), (8, 3.35), (32, 4.06), (64, 5.0), (128, 6.3))
        scoring = ((2, 3.35), (5, 3.43), (40, 3.85), (80, 4.4), (160, 5.72), (320, 8.5), (640, 14.0))
        return interpolate(plain, rows) if tokens == rows else interpolate(scoring, tokens)


@dataclass(frozen=True)
class LongContexts(H200):
    """Sessions of 4,000 tokens each, whose draft has an attention window; texts as a log on one H100 showed them."""

    prompt_tokens: int = 4000
    most_lacked: int = 1536
    text_a_round: int = 2000
    text_beside_drafts: int = 256
    are_texts_cached: bool = True


@dataclass(frozen=True)
class MeasuredLongContexts(LongContexts, MeasuredPair):
    """A 1B draft with an attention window beside the target, where each session holds 4,000 tokens.

    Measured with 64 users on one card; that each further row reads as much of its own KV again is extrapolated.
    """

    def target(self, rows: int, tokens: int) -> float:
        return super().target(rows, tokens) + 0.115 * rows

    def draft(self, rows: int, length: int) -> float:
        return super().draft(rows, length) + rows * (0.013 + 0.0077 * length) if length else 0.0

    def between(self, rows: int) -> float:
        return 0.88 + 0.0214 * rows

    def prefill(self, tokens: int) -> float:
        return 0.0044 * tokens


@dataclass(frozen=True)
class MeasuredH100(H200):
    """A 1B draft beside the target on one H100, whose memory is slower: drafts pay among 64 users.

    Measured with 1, 8, 32, 64 and, plainly, 128 and 256 users.
    """

    def target(self, rows: int, tokens: int) -> float:
        plain = ((1, 5.6), (8, 5.7), (32, 6.05), (64, 6.75), (128, 8.3), (256, 12.2))
        scoring = ((2, 5.75), (6, 5.85), (46, 6.3), (128, 7.3), (190, 8.1), (256, 9.9), (384, 12.6), (640, 19.5))
        return interpolate(plain, rows) if tokens == rows else interpolate(scoring, tokens)

    def draft(self, rows: int, length: int) -> float:
        step = interpolate(((1, 1.05), (8, 1.22), (32, 1.55), (64, 1.85), (128, 2.6)), rows)
        return 0.1 + length * step if length else 0.0

    def between(self, rows: int) -> float:
        return interpolate(((1, 0.6), (8, 0.8), (32, 1.25), (64, 1.5), (128, 2.2)), rows)

    def plain_between(self, rows: int) -> float:
        return 1.0 + 0.01 * rows

    def prefill(self, tokens: int) -> float:
        return 0.01 * tokens


@dataclass(frozen=True)
class MeasuredH100OfQuickCoordinator(MeasuredH100):
    """The same where many users hardly lengthen the time between the forwards."""

    def between(self, rows: int) -> float:
        return interpolate(((1, 2.1), (8, 2.3), (32, 2.0), (64, 3.0), (128, 6.0)), rows)


@dataclass(frozen=True)
class MeasuredH100OfSlowerHost(MeasuredH100):
    """The same on a host that takes twice as long between the forwards: among 64 users drafts do not pay."""

    def draft(self, rows: int, length: int) -> float:
        return 1.08 * super().draft(rows, length)

    def between(self, rows: int) -> float:
        return interpolate(((1, 1.35), (8, 1.8), (32, 2.5), (64, 3.9), (128, 6.0)), rows)

    def plain_between(self, rows: int) -> float:
        return 1.5 + 0.02 * rows


@dataclass(frozen=True)
class MeasuredLongContextsH100(LongContexts, MeasuredH100):
    """A 1B draft with an attention window beside the target on one H100, where each session holds 4,000 tokens.

    Measured with 64 users, plainly and with 3 and 5 draft tokens.
    """

    def target(self, rows: int, tokens: int) -> float:
        return super().target(rows, tokens) + 0.158 * rows

    def draft(self, rows: int, length: int) -> float:
        return super().draft(rows, length) + rows * (0.018 + 0.0047 * length) if length else 0.0
